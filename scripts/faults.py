"""Puts faults into small PPO runs, one at a time, starts each again, and says what was lost.

    python scripts/faults.py RUN_DIR [--only WORD ...]

Every case is a run of 5 iterations on 2 CPU ranks with a checkpoint every 2. It is hurt; the same command starts it again; and
what it ends with must be the bits of a run that nothing happened to: models, samples, metrics, the last checkpoint. The program is
the real one; scripts/faulty_ppo.py puts the fault in from outside. The table is written to RUN_DIR/faults.md as it grows.
Where processes are killed at a random moment, every step of a save (flush, rename, removal) is slow, so that most moments lie in one.
Ends with 1 if a run did not come to the straight one's bits, did not end as it should, or left a process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

ROOT = Path(__file__).resolve().parents[1]
ITERATIONS = 5
MOST_SECONDS = 300.0
_MARK = "RLHF_MC_FAULTS_RUN"
_START = 'source scripts/launch.sh && launch "$@"'
_OF_THE_MACHINE = ("timing_s/", "perf/", "memory_gib/", "offload/", "pipeline/", "rollout/", "straggler/", "medusa/speedup_estimate")
_NEWEST = f"checkpoints/{ITERATIONS - 1:06d}"
_APART = {"rollout.placement": "separate", "rollout.engine_ranks": "1"}
_RANDOM_KILLS = 20
_SECONDS_TO_KILL = 7.0
# 15 slow steps in a save: of files, of the directory, of its name, of `latest`, of the older one that goes.
# Exports have more steps than that, and would take most of the time.
_SLOW_SAVES: dict = {"environment": {"SLOW_DISK": "0.25"}, "settings": {"trainer.keep_last": "1", "trainer.export_every": "0"}}


@dataclass(frozen=True)
class Case:
    """One fault. faults: for faulty_ppo.  environment, settings: of the attempt that is hurt; settings of the other ones too.

    kills: at a random moment after the first iteration these are killed, all processes or one rank.  harm: done to the run's
    directory before it is started again.  told: what the attempt must print.  goes_on: it ends well by itself, and is not started
    again.  skips: an update, so that its bits are not the straight run's.
    """

    name: str
    told: str = ""
    faults: tuple[Mapping[str, object], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    kills: Literal["all", "rank 0", "rank 1"] | None = None
    harm: Callable[[Path], None] = lambda run: None
    goes_on: bool = False
    skips: bool = False


def fault(stage: str, action: str, iteration: int = 3, rank: int = 1, **more: object) -> tuple[Mapping[str, object], ...]:
    """For Case.faults. Exports and checkpoints come when their iteration was logged, so that the clock has begun the next one."""
    iteration += stage in ("save", "save_checkpoint")
    return ({"stage": stage, "iteration": iteration, "rank": rank, "action": action, **more},)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cases() -> list[Case]:
    """All of them."""
    return [*killed(), *asked(), *damaged(), *spoilt(), *asleep()]


def killed() -> list[Case]:
    """Processes that end without a word."""
    found = [Case(f"kill -9 of rank 1 in {stage}", faults=fault(stage, "kill")) for stage in ("generate", "score/actor", "update_actor")]
    for number in range(1, _RANDOM_KILLS + 1):
        kills = ("all", "rank 1", "all", "rank 0")[number % 4]
        found.append(Case(f"kill -9 of {kills}, random moment {number}", kills=kills, **_SLOW_SAVES))
    return [
        *found,
        Case("kill -9 of rank 0 in save_checkpoint", faults=fault("save_checkpoint", "kill", rank=0)),
        Case("kill -9 of rank 0 in finish_checkpoint", faults=fault("finish_checkpoint", "kill", iteration=4, rank=0)),
        Case("kill -9 of rank 0 in an export", faults=fault("save", "kill", rank=0)),
        Case("kill -9 of torchrun in generate", faults=fault("generate", "kill torchrun")),
        Case("kill -9 of the engine's rank", faults=fault("generate", "kill", iteration=0), settings=_APART),
        Case(
            "kill -9 of rank 1 in update_critic, --max-restarts 1",
            f"{ITERATIONS - 1} of {ITERATIONS} iterations are done",
            fault("update_critic", "kill", iteration=4),
            environment={"MAX_RESTARTS": "1"},
            goes_on=True,
        ),
        Case("error on rank 1 in score/critic", "error on rank 1", fault("score/critic", "fail")),
    ]


def asked() -> list[Case]:
    """Signals that ask to stop."""
    told = "stopped: the checkpoint"
    stages = ("sync_weights", "generate", "score/critic", "reward_functions", "update_critic", "update_actor")
    stages += ("evaluate", "save_checkpoint")
    return [
        *(Case(f"SIGTERM in {stage}", told, fault(stage, "term")) for stage in stages),
        Case("SIGUSR1 in generate", told, fault("generate", "usr1")),
        Case("SIGTERM to rank 1 alone in generate", told, fault("generate", "term one rank")),
        Case("SIGTERM, engine apart, in generate", told, fault("generate", "term", rank=0), settings=_APART),
    ]


def damaged() -> list[Case]:
    """Files that are not what was saved, and disks that take none."""
    one, gone = "rank00001.actor.safetensors", fault("update_critic", "kill", iteration=4)
    return [
        Case("flipped byte in the newest checkpoint", faults=gone, harm=lambda run: flip(run / _NEWEST / one)),
        Case("newest checkpoint cut short", faults=gone, harm=lambda run: os.truncate(run / _NEWEST / one, 1000)),
        Case("file of the newest checkpoint missing", faults=gone, harm=lambda run: (run / _NEWEST / one).unlink()),
        Case("`latest` is stale", faults=gone, harm=lambda run: (run / "checkpoints/latest").write_text("000002\n") and None),
        *(
            Case(f"disk of rank {rank} full at a checkpoint", "cannot be written", fault("save_checkpoint", "full disk", rank=rank))
            for rank in (0, 1)
        ),
        Case("disk of rank 0 full at an export", "the model cannot be written", fault("save", "full disk", rank=0)),
    ]


def spoilt() -> list[Case]:
    """Numbers that are none, or beyond all bounds."""
    skipped, given_up = "is skipped: the gradient norm is nan", "3 updates of the critic in a row"
    return [
        Case("NaN in one gradient", skipped, fault("update_critic", "nan gradient"), goes_on=True, skips=True),
        Case("NaN in every gradient", given_up, fault("update_critic", "nan gradient", times=99)),
        Case("NaN in every loss", given_up, fault("update_critic", "nan loss", times=99)),
        Case("NaN in every reward", "is above reward.max_error_rate", environment={"WILD_REWARD": "nan"}, settings={"trainer.save_every": "4"}),
        Case("rewards of 1e30", "beyond guard.max_score", environment={"WILD_REWARD": "1e30"}, settings={"trainer.save_every": "4"}),
    ]


def asleep() -> list[Case]:
    """A rank that does nothing any more."""
    stages = ("sync_weights", "generate", "score/critic", "reward_functions", "update_actor", "evaluate", "save_checkpoint")
    return [Case(f"rank 1 asleep for ever in {stage}", "rlhf_mc: watchdog: rank ", fault(stage, "sleep")) for stage in stages]


class Attempt:
    """One start of the program, from outside."""

    def __init__(self, case: Case, run: Path, task: Path, hurt: bool) -> None:
        settings = settings_of(run, task) | dict(case.settings)
        self._mark, self._log = uuid.uuid4().hex, run.with_suffix(".log")
        environment = os.environ | {_MARK: self._mark, "FAULTS": json.dumps(case.faults if hurt else [])}
        environment |= case.environment if hurt else {}
        self._offset = self._log.stat().st_size if self._log.exists() else 0
        command = ["bash", "-c", _START, "launch", "scripts.faulty_ppo", *(f"{key}={value}" for key, value in settings.items())]
        # Through a pipe, which a rank whose disk is full can still write to.
        with open(self._log, "a") as log:
            self._copier = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log)
        pipe = self._copier.stdin
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
        pipe.close()

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")[self._offset :]

    def read_to_the_end(self) -> None:
        """What it printed is complete from here on; none of its processes may be there any more."""
        self._copier.wait()

    def processes(self) -> list[psutil.Process]:
        """All that belong to it and are alive."""
        return [process for process in psutil.process_iter() if environment_of(process).get(_MARK) == self._mark]

    def rank(self, rank: int) -> psutil.Process:
        """A rank itself; its workers inherit its environment, but torchrun is not their parent."""
        found = [process for process in self.processes() if environment_of(process).get("RANK") == str(rank)]
        return next(process for process in found if "RANK" not in environment_of(process.parent()))

    def wait(self, text: str | None = None) -> float | None:
        """Until it has ended, or printed `text`; when it was seen to do so (time.monotonic), None where the time was over."""
        start = time.monotonic()
        while time.monotonic() - start < MOST_SECONDS:
            if self.process.poll() is not None or (text is not None and text in self.output):
                return time.monotonic()
            time.sleep(0.1)
        return None

    def kill(self) -> None:
        """All of it at once."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


def environment_of(process: psutil.Process) -> dict[str, str]:
    """As it was started; empty where the process is gone."""
    with suppress(psutil.Error):
        return process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
    return {}


def settings_of(run: Path, task: Path) -> dict[str, str]:
    """A run with all that a run may have: draft heads, dumps, exports, evaluation, several updates an iteration, a KL coefficient that moves."""
    return {
        "trainer.output_dir": str(run),
        "trainer.dtype": "fp32",
        "trainer.iterations": str(ITERATIONS),
        "trainer.save_every": "2",
        "trainer.evaluate_every": "2",
        "trainer.export_every": "2",
        "data.train": f"[{task}/prompts.jsonl]",
        "data.validation": f"[{task}/validation.jsonl]",
        "data.chat_template": "false",
        "data.max_prompt_tokens": "16",
        "data.prompts_per_iteration": "8",
        "actor.path": f"{task}/model",
        "critic.path": f"{task}/model",
        "reward.functions": f'[{{path: "{ROOT}/scripts/faulty_reward.py:digits"}}]',
        "rollout.samples_per_prompt": "2",
        "rollout.max_tokens": "8",
        "rollout.kv_cache_gib": "0.01",
        "rollout.dump": "true",
        "algorithm.epochs": "2",
        "algorithm.mini_batch_sequences": "8",
        "algorithm.kl": "{use: reward, coef: 0.1, target: 0.05, horizon: 100}",
        "medusa.enabled": "true",
        "medusa.drafted_tokens": "2",
        "pipeline.chunks": "2",
        "watchdog": "{seconds: 12, factor: 3}",
        "wandb.mode": "disabled",
    }


def lines_of(path: Path) -> list[dict]:
    """A JSONL file's."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def differences(run: Path, straight: Path) -> list[str]:
    """What is not as in the straight run."""
    files = [f"{role}/model.safetensors" for role in ("actor", "critic", "medusa")] + ["samples.jsonl"]
    files += [str(path.relative_to(straight)) for path in sorted(straight.glob(f"{_NEWEST}/rank*"))]
    files += [str(path.relative_to(straight)) for path in sorted([*straight.glob("rollouts/*"), *straight.glob("exports/*/*/*")])]
    found = [name for name in files if not (run / name).exists() or (run / name).read_bytes() != (straight / name).read_bytes()]
    ours, theirs = (
        [{k: v for k, v in line.items() if not k.startswith(_OF_THE_MACHINE)} for line in lines_of(at / "metrics.jsonl")]
        for at in (run, straight)
    )
    return found + (["metrics.jsonl"] if ours != theirs else [])


@dataclass(frozen=True)
class Row:
    """One line of the table. again: iterations that had been logged and were made again.  bits: whether they are the straight run's.

    wrong: what was not as it should be; empty where all was.
    """

    name: str
    ended: str
    again: str
    bits: str
    wrong: str


def tried(case: Case, run: Path, task: Path, straights: Callable[[Case], Path]) -> Row:
    """Hurts a run, starts it again, and compares it with the straight one."""
    shutil.rmtree(run, ignore_errors=True)
    run.with_suffix(".log").unlink(missing_ok=True)
    attempt = Attempt(case, run, task, hurt=True)
    ended, wrong = ending(case, attempt, run)
    done, origin = len(lines_of(run / "metrics.jsonl")), 0
    if not case.goes_on:
        case.harm(run)
        attempt = Attempt(case, run, task, hurt=False)
        if attempt.wait() is None or attempt.process.returncode:
            wrong.append("could not be started again")
            attempt.kill()
        _, _, where = attempt.output.partition(f"resumes from {run}/checkpoints/")
        origin = int(where[:6]) if where else 0
    elif attempt.process.returncode or done != ITERATIONS:
        wrong.append(f"ended with {attempt.process.returncode}")
    if not case.skips and (different := differences(run, straights(case))):
        wrong.append(f"other bits in {', '.join(different)}")
    again = f"{done - origin} of {done} iterations" if done > origin and not case.goes_on else "none"
    bits = "one update is missing, as it should" if case.skips else "yes"
    return Row(case.name, ended, again, bits, "; ".join(wrong))


def ending(case: Case, attempt: Attempt, run: Path) -> tuple[str, list[str]]:
    """Waits until an attempt that is hurt is gone. How it ended, and what was not as it should be."""
    wrong, where = [], ""
    if case.kills:
        where = f"{strike(case, attempt, run)}; "
    since = attempt.wait("fault: ") if case.faults else time.monotonic()
    if attempt.wait() is None:
        wrong.append("did not end")
        attempt.kill()
    while left := attempt.processes():
        if time.monotonic() - since > MOST_SECONDS:
            wrong.append(f"left processes {left}")
            attempt.kill()
        time.sleep(0.1)
    seconds = time.monotonic() - since
    attempt.read_to_the_end()
    if case.faults and "fault: " not in attempt.output:
        wrong.append("the fault did not come")
    if case.told not in attempt.output:
        wrong.append(f"did not say '{case.told}'")
    if case.goes_on:
        return "goes on", wrong
    return f"{where}all gone after {seconds:.1f} s" if case.faults or case.kills else "with an error", wrong


def strike(case: Case, attempt: Attempt, run: Path) -> str:
    """Kills at a random moment, the same in each run of this script. What was on the disk then."""
    attempt.wait("\n     0 ")
    time.sleep(random.Random(case.name).uniform(0.0, _SECONDS_TO_KILL))
    if attempt.process.poll() is not None:
        return "was done before"
    if case.kills == "all":
        attempt.kill()
    else:
        attempt.rank(int(case.kills.split()[1])).kill()
    return standing(run / "checkpoints")


def standing(root: Path) -> str:
    """In which phase of a save a run was, by what it had on the disk."""
    names = sorted(path.name for path in root.iterdir()) if root.exists() else []
    whole = [name for name in names if name.isdecimal()]
    if any(name.endswith(".removed.partial") for name in names):
        return "an older checkpoint was going"
    if partial := next((name for name in names if name.split(".")[0].isdecimal() and name.endswith(".partial")), None):
        files = {path.name for path in (root / partial).iterdir()}
        return f"{partial} had {len(files)} files, {'a' if 'manifest.json' in files else 'no'} manifest"
    if whole and (root / "latest").exists() and (root / "latest").read_text().strip() == whole[-1]:
        return f"{whole[-1]} was complete"
    return f"{whole[-1]} was named, not `latest`" if whole else "no checkpoint had been begun"


class Straights:
    """Runs that nothing happened to, one for each set of settings, made when first asked for."""

    def __init__(self, root: Path, task: Path) -> None:
        self._root, self._task, self._made = root, task, {}

    def __call__(self, case: Case) -> Path:
        key = json.dumps(dict(case.settings))
        if key not in self._made:
            run = self._root / f"straight{len(self._made)}"
            shutil.rmtree(run, ignore_errors=True)
            attempt = Attempt(Case("straight", "", settings=case.settings), run, self._task, hurt=False)
            if attempt.wait() is None or attempt.process.returncode:
                attempt.kill()
                raise SystemExit(f"the straight run failed:\n{attempt.output}")
            self._made[key] = run
        return self._made[key]


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = ["| fault | the job | logged iterations that were made again | bits of the straight run |", "|---|---|---|---|"]
    lines += [f"| {row.name} | {row.ended} | {row.again} | {f'NO: {row.wrong}' if row.wrong else row.bits} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Faults, and what they cost.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name has one of these in it")
    arguments = parser.parse_args()
    root = arguments.run_dir.resolve()
    task = root / "task"
    sizes = ["--num-train=64", "--num-validation=6", "--num-sft=8", "--num-preferences=8", "--num-layers=2"]
    subprocess.run([sys.executable, str(ROOT / "scripts/make_tiny_task.py"), str(task), *sizes], check=True)
    straights, rows, start = Straights(root, task), [], time.monotonic()
    chosen = [case for case in cases() if any(word in case.name for word in arguments.only)]
    for number, case in enumerate(chosen):
        row = tried(case, root / f"case{number:02d}", task, straights)
        rows.append(row)
        (root / "faults.md").write_text(table(rows))
        minutes = (time.monotonic() - start) / 60
        so_far = f"{number + 1} of {len(chosen)}, {minutes:.0f} min"
        print(f"{so_far}: {row.name}: {row.ended}; made again: {row.again}; bits: {row.wrong or row.bits}", flush=True)
    sys.exit(any(row.wrong for row in rows))


if __name__ == "__main__":
    main()

"""Puts faults into small PPO runs, one at a time, starts each run again, and says what was lost: python scripts/faults.py RUN_DIR [--only WORD ...]

Every case is a run of 5 iterations on 2 CPU ranks with a checkpoint every 2. It is hurt; the same command starts it again; and
what it ends with must be the bits of a run that nothing happened to: models, samples, metrics, the last checkpoint. The program is
the real one; scripts/faulty_ppo.py puts the fault in from outside. The table is written to RUN_DIR/faults.md as it grows.
Ends with 1 if a run did not come to the straight one's bits, did not end as it should, or left a process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ITERATIONS = 5
MOST_SECONDS = 300.0
_MARK = "RLHF_MC_FAULTS_RUN"
_START = 'source scripts/launch.sh && launch "$@"'
_OF_THE_MACHINE = ("timing_s/", "perf/", "memory_gib/", "offload/", "pipeline/", "rollout/", "straggler/", "medusa/speedup_estimate")
_NEWEST = f"checkpoints/{ITERATIONS - 1:06d}"


@dataclass(frozen=True)
class Case:
    """One fault. faults: for faulty_ppo.  environment, settings: of the attempt that is hurt; settings of the other ones too.

    at_random: all processes are killed at a random moment after the first iteration.  harm: done to the run's directory before it is
    started again.  told: what the attempt must print.  ends: it ends by itself well, and is not started again.
    """

    name: str
    told: str
    faults: tuple[Mapping[str, object], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    at_random: bool = False
    harm: Callable[[Path], None] = lambda run: None
    ends: bool = False


def fault(stage: str, action: str, iteration: int = 3, rank: int = 1, **more: object) -> tuple[Mapping[str, object], ...]:
    """For Case.faults. A checkpoint comes when its iteration was logged, so that the clock has begun the next one."""
    iteration += stage == "save_checkpoint"
    return ({"stage": stage, "iteration": iteration, "rank": rank, "action": action, **more},)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cases() -> list[Case]:
    """All of them."""
    one, gone = "rank00001.actor.safetensors", fault("update_critic", "kill", iteration=4)
    apart = {"rollout.placement": "separate", "rollout.engine_ranks": "1"}
    found = [Case(f"kill -9 of rank 1 in {stage}", "", fault(stage, "kill")) for stage in ("generate", "score/actor", "update_actor")]
    found += [
        Case("kill -9 of rank 0 in save_checkpoint", "", fault("save_checkpoint", "kill", rank=0)),
        Case("kill -9 of torchrun in generate", "", fault("generate", "kill torchrun")),
        *(Case(f"kill -9 of all, random moment {n}", "", at_random=True) for n in range(1, 21)),
        Case("kill -9 of the engine's rank", "", fault("generate", "kill", iteration=0), settings=apart),
        Case("error on rank 1 in score/critic", "error on rank 1", fault("score/critic", "fail")),
    ]
    stages = ("sync_weights", "generate", "score/critic", "update_critic", "update_actor", "evaluate", "save_checkpoint")
    found += [Case(f"SIGTERM in {stage}", "stopped: the checkpoint", fault(stage, "term")) for stage in stages]
    found += [
        Case("SIGUSR1 in generate", "stopped: the checkpoint", fault("generate", "usr1")),
        Case("SIGTERM to rank 1 alone in generate", "stopped: the checkpoint", fault("generate", "term one rank")),
        Case("SIGTERM, engine apart, in generate", "stopped: the checkpoint", fault("generate", "term", rank=0), settings=apart),
        Case("flipped byte in the newest checkpoint", "", gone, harm=lambda run: flip(run / _NEWEST / one)),
        Case("newest checkpoint cut short", "", gone, harm=lambda run: os.truncate(run / _NEWEST / one, 1000)),
        Case("file of the newest checkpoint missing", "", gone, harm=lambda run: (run / _NEWEST / one).unlink()),
        Case("`latest` is stale", "", gone, harm=lambda run: (run / "checkpoints/latest").write_text("000002\n") and None),
        *(
            Case(f"disk of rank {rank} full at a checkpoint", "cannot be written", fault("save_checkpoint", "full disk", rank=rank))
            for rank in (0, 1)
        ),
        Case("NaN in one gradient", "is skipped: the gradient norm is nan", fault("update_critic", "nan gradient"), ends=True),
        Case("NaN in every gradient", "3 updates of the critic in a row", fault("update_critic", "nan gradient", times=99)),
        Case("NaN in every loss", "3 updates of the critic in a row", fault("update_critic", "nan loss", times=99)),
        Case("rewards of 1e30", "beyond guard.max_score", environment={"WILD_REWARD": "1"}, settings={"trainer.save_every": "4"}),
    ]
    stages = ("sync_weights", "generate", "score/critic", "reward_functions", "update_actor", "save_checkpoint")
    found += [Case(f"rank 1 asleep for ever in {stage}", "rlhf_mc: watchdog: rank ", fault(stage, "sleep")) for stage in stages]
    return found


class Attempt:
    """One start of the program, from outside."""

    def __init__(self, case: Case, run: Path, task: Path, hurt: bool) -> None:
        settings = settings_of(run, task) | dict(case.settings)
        self._mark, self._log = uuid.uuid4().hex, run.with_suffix(".log")
        environment = os.environ | {_MARK: self._mark, "FAULTS": json.dumps(case.faults if hurt else [])}
        environment |= case.environment if hurt else {}
        self._offset = self._log.stat().st_size if self._log.exists() else 0
        command = ["bash", "-c", _START, "launch", "scripts.faulty_ppo", *(f"{key}={value}" for key, value in settings.items())]
        with open(self._log, "a") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")[self._offset :]

    def processes(self) -> list[int]:
        """All that belong to it and are alive."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and f"{_MARK}={self._mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

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
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def settings_of(run: Path, task: Path) -> dict[str, str]:
    """A run with all that a run may have: draft heads, dumps, evaluation, several updates an iteration, a KL coefficient that moves."""
    return {
        "trainer.output_dir": str(run),
        "trainer.dtype": "fp32",
        "trainer.iterations": str(ITERATIONS),
        "trainer.save_every": "2",
        "trainer.evaluate_every": "2",
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
    files += [str(path.relative_to(straight)) for path in sorted(straight.glob("rollouts/*"))]
    found = [name for name in files if not (run / name).exists() or (run / name).read_bytes() != (straight / name).read_bytes()]
    ours, theirs = (
        [{k: v for k, v in line.items() if not k.startswith(_OF_THE_MACHINE)} for line in lines_of(at / "metrics.jsonl")]
        for at in (run, straight)
    )
    return found + (["metrics.jsonl"] if ours != theirs else [])


@dataclass(frozen=True)
class Row:
    """One line of the table. wrong: what was not as it should be; empty where all was."""

    name: str
    ended: str
    lost: str
    wrong: str


def tried(case: Case, run: Path, task: Path, straights: Callable[[Case], Path]) -> Row:
    """Hurts a run, starts it again, and compares it with the straight one."""
    shutil.rmtree(run, ignore_errors=True)
    run.with_suffix(".log").unlink(missing_ok=True)
    wrong = []
    attempt = Attempt(case, run, task, hurt=True)
    if case.at_random:
        attempt.wait("\n     0 ")
        time.sleep(random.Random(case.name).uniform(0.0, 4.0))
        attempt.kill()
    since = attempt.wait("fault: ") if case.faults else time.monotonic()
    if attempt.wait() is None:
        wrong.append("did not end")
        attempt.kill()
    while left := attempt.processes():
        if time.monotonic() - since > MOST_SECONDS:
            wrong.append(f"left processes {left}")
            attempt.kill()
        time.sleep(0.1)
    seconds, output, done = time.monotonic() - since, attempt.output, len(lines_of(run / "metrics.jsonl"))
    if case.faults and "fault: " not in output:
        wrong.append("the fault did not come")
    if case.told not in output:
        wrong.append(f"did not say '{case.told}'")
    if case.ends:
        if attempt.process.returncode or done != ITERATIONS:
            wrong.append(f"ended with {attempt.process.returncode}")
        return Row(case.name, "goes on", "1 update", "; ".join(wrong))
    case.harm(run)
    again = Attempt(case, run, task, hurt=False)
    if again.wait() is None or again.process.returncode:
        wrong.append("could not be started again")
        again.kill()
    _, _, where = again.output.partition(f"resumes from {run}/checkpoints/")
    origin = int(where[:6]) if where else 0
    different = differences(run, straights(case))
    if different:
        wrong.append(f"other bits in {', '.join(different)}")
    lost = f"{done - origin} of {done} iterations" if done > origin else "nothing that was done"
    ended = "" if case.at_random or not case.faults else f"all gone {seconds:.1f} s after the fault"
    return Row(case.name, ended, lost, "; ".join(wrong))


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
    lines = ["| fault | how the job ended | lost | bits of the straight run |", "|---|---|---|---|"]
    lines += [f"| {row.name} | {row.ended} | {row.lost} | {f'NO: {row.wrong}' if row.wrong else verdict(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def verdict(row: Row) -> str:
    """Of a row in which all was as it should be."""
    return "another run, as one update is missing" if row.ended == "goes on" else "yes"


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
    straights, rows = Straights(root, task), []
    for number, case in enumerate(case for case in cases() if any(word in case.name for word in arguments.only)):
        rows.append(tried(case, root / f"case{number:02d}", task, straights))
        print(f"{rows[-1].name}: {rows[-1].ended}; lost: {rows[-1].lost}; {rows[-1].wrong or verdict(rows[-1])}", flush=True)
        (root / "faults.md").write_text(table(rows))
    sys.exit(any(row.wrong for row in rows))


if __name__ == "__main__":
    main()

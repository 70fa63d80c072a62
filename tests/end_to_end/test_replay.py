"""The loop cut in two, on 2 ranks: a run that dumps its rollouts, an update from them, and rollouts alone, all of the same bits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from end_to_end.job import Job, start
from end_to_end.task import Task, written

from rlhf_mc.rollout_files import read_header

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ITERATIONS = 3
# What an update without an engine does not do, or does in another time.
_NOT_OF_THE_UPDATE = ("timing_s/", "perf/", "memory_gib/", "offload/", "pipeline/", "rollout/", "sync/", "straggler/")


@dataclass(frozen=True)
class Run:
    """What a finished run left."""

    directory: Path
    output: str

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Of each iteration, what does not depend on the machine."""
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(_NOT_OF_THE_UPDATE)} for line in lines]

    def rollouts(self) -> dict[str, bytes]:
        """The files of its rollouts directory, by name."""
        return {path.name: path.read_bytes() for path in sorted((self.directory / "rollouts").iterdir())}


def launch(task: Task, name: str, **overrides: str) -> tuple[Job, Path]:
    """Two data-parallel ranks with whatever an update can be asked for; a KL coefficient that moves, and a falling rate."""
    text = task.directory / "text.jsonl"
    text.write_text("".join(f'{{"text": "sort {i % 10} {i % 7} {i % 3} ="}}\n' for i in range(40)))
    function = '{path: "rlhf_mc.rewards.builtin:regex_match", name: has_one, weight: 2.0, arguments: {pattern: "1"}}'
    settings = task.overrides(task.directory / name, "mistral") | {
        "trainer.iterations": str(ITERATIONS),
        "data.validation": "[]",
        "data.ptx": f"[{text}]",
        "actor.ptx_coef": "0.5",
        "actor.optim.schedule": "linear",
        "critic.optim.schedule": "linear",
        "algorithm.epochs": "2",
        "algorithm.mini_batch_sequences": "8",
        "algorithm.kl": "{use: loss, estimator: k3, coef: 0.1, target: 0.05, horizon: 100}",
        "reward.functions": f"[{function}]",
        "reward.truncated": "mask",
    }
    settings |= {key.replace("__", "."): value for key, value in overrides.items()}
    return start(task.directory / f"{name}.log", "rlhf_mc.train", written(settings)), task.directory / name


def run(task: Task, name: str, **overrides: str) -> Run:
    """A launch that must go well."""
    job, directory = launch(task, name, **overrides)
    assert job.wait(500) == 0, job.output
    return Run(directory, job.output)


@pytest.fixture(scope="module")
def ppo(task) -> Run:
    return run(task, "ppo", rollout__dump="true")


def test_an_update_from_the_dumps_gives_the_same_models_and_metrics(task, ppo):
    update = run(task, "update", trainer__mode="update", rollout__replay_dir=f"{ppo.directory}/rollouts")
    assert list(ppo.rollouts()) == ["000000.jsonl", "000001.jsonl", "000002.jsonl"]
    assert [line["iteration"] for line in update.metrics] == list(range(ITERATIONS))
    assert len(update.metrics[0]) > 40 and update.metrics == ppo.metrics
    for file in ("actor/model.safetensors", "critic/model.safetensors", "samples.jsonl"):
        assert (update.directory / file).read_bytes() == (ppo.directory / file).read_bytes(), file
    assert not (update.directory / "rollouts").exists()
    built = ("actor: weights", "critic: weights", "reference: weights", "reward_model: weights", "engine: starting vLLM")
    assert [text in update.output for text in built] == [True, True, False, False, False]
    assert [text in ppo.output for text in built] == [True] * 5


def test_the_files_hold_what_moved(ppo):
    """Else the test above would not see a coefficient that was left out, or a mask."""
    coefs = [read_header(ppo.directory / "rollouts" / name).kl_coef for name in ppo.rollouts()]
    assert coefs == [line["actor/kl_coef"] for line in ppo.metrics] and len({0.1, *coefs}) == ITERATIONS + 1
    lines = [json.loads(line) for text in ppo.rollouts().values() for line in text.splitlines()[1:]]
    assert {flag for line in lines for flag in line["loss_mask"]} == {True, False}
    shown = [json.loads(line) for line in (ppo.directory / "samples.jsonl").read_text().splitlines()]
    assert [[row["prompt"], row["response"], row["finish_reason"], row["score"], row["parts"]] for row in shown[:8]] == [
        [line["prompt"], line["response"], line["stop_reason"], line["score"], line["reward_parts"]] for line in lines[:8]
    ]


def test_rollouts_alone_are_those_of_the_first_iteration(task, ppo):
    rollout = run(task, "rollout", trainer__mode="rollout", trainer__iterations="1")
    assert rollout.rollouts() == {"000000.jsonl": ppo.rollouts()["000000.jsonl"]}
    assert not (rollout.directory / "actor").exists() and not (rollout.directory / "critic").exists()
    assert not any("loss" in name or "grad_norm" in name for name in rollout.metrics[0])


def test_a_damaged_file_ends_every_rank_with_its_line(task, ppo, tmp_path):
    first = ppo.rollouts()["000000.jsonl"].splitlines(keepends=True)
    (tmp_path / "000000.jsonl").write_bytes(b"".join(first[:5]) + first[5][:100])
    job, _ = launch(task, "damaged", trainer__mode="update", rollout__replay_dir=str(tmp_path), trainer__iterations="1")
    assert job.wait(200) != 0
    assert job.output.count(f"rlhf_mc: train: {tmp_path}/000000.jsonl:6: the line is damaged") == 1, job.output
    assert "exitcode  : 2" in job.output


def test_a_full_disk_ends_every_rank_with_the_name_of_the_file(task):
    rollouts = task.directory / "full" / "rollouts"
    rollouts.mkdir(parents=True)
    (rollouts / "000000.jsonl.partial").symlink_to("/dev/full")
    job, _ = launch(task, "full", trainer__mode="rollout", trainer__iterations="1")
    assert job.wait(200) != 0
    assert f"rank 0: {rollouts}/000000.jsonl: the rollout cannot be written: No space left on device" in job.output, job.output
    assert list(rollouts.iterdir()) == []

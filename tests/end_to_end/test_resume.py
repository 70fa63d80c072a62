"""A run that is asked to stop, resumed, and started again by torchrun when a rank was killed, is the run that was not.

The same bits of all models, metrics and samples; on other numbers of ranks the same samples, and numbers within rounding.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.job import Job, start
from end_to_end.task import Task, written
from ranks import RankPool
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ITERATIONS = 4
# What two runs of the same numbers may differ in.
_OF_THE_MACHINE = ("timing_s/", "perf/", "memory_gib/", "offload/", "pipeline/", "rollout/", "straggler/", "medusa/speedup_estimate")
MODELS = ("actor/model.safetensors", "critic/model.safetensors", "medusa/model.safetensors")


def launch(task: Task, name: str, *faults: dict[str, Any], ranks: int = 2, **environment: str) -> Job:
    """Data-parallel ranks with draft heads in use, the pipeline in chunks, a KL coefficient that moves, falling rates."""
    settings = task.overrides(task.directory / name, "llama") | {
        "trainer.iterations": str(ITERATIONS),
        "trainer.num_sample_rows": "16",
        "trainer.save_every": "2",
        "trainer.export_every": "2",
        "actor.optim.schedule": "linear",
        "critic.optim.schedule": "cosine",
        "algorithm.epochs": "2",
        "algorithm.mini_batch_sequences": "8",
        "algorithm.kl": "{use: reward, estimator: k1, coef: 0.1, target: 0.05, horizon: 100}",
        "medusa.enabled": "true",
        "medusa.drafted_tokens": "2",
        "pipeline.chunks": "2",
    }
    log = task.directory / f"{name}-{len(list(task.directory.iterdir()))}.log"
    program = "scripts.faulty_ppo" if faults else "rlhf_mc.train"
    return start(log, program, written(settings), ranks, {"FAULTS": json.dumps(faults), **environment})


def finished(job: Job) -> str:
    """The output of a job that must go well."""
    assert job.wait(500) == 0, job.output
    return job.output


def metrics(directory: Path) -> list[dict[str, float]]:
    """Of each iteration, what does not depend on the machine."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(_OF_THE_MACHINE)} for line in lines]


def samples(directory: Path) -> list[list[tuple[str, ...]]]:
    """Of each iteration, what was asked and what was answered, in order."""
    rows = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    named = [[row for row in rows if row["iteration"] == i] for i in sorted({row["iteration"] for row in rows})]
    return [[(row["prompt"], row["response"], row["finish_reason"]) for row in of] for of in named]


def checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def files(directory: Path) -> dict[str, bytes]:
    """All below it, by their paths."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def check_exports(ranks: RankPool, run: Path, aside: Path) -> None:
    """The last one is what the run leaves at its end, the first what its checkpoint of these iterations makes; the ledger has both."""
    last, first = run / "exports/000004", run / "exports/000002"
    assert sorted(run.glob("exports/*")) == [first, last]
    ranks.run("checkpoint.on_ranks:export_all", checkpoint=str(run / "checkpoints/000002"), target=str(aside))
    assert files(first) == files(aside)
    for role in ("actor", "critic", "medusa"):
        assert files(last / role) == files(run / role)
        assert (first / role / "model.safetensors").read_bytes() != (last / role / "model.safetensors").read_bytes()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["offload/to_host_gib"] + line["offload/to_device_gib"] == line["offload/minimum_gib"] for line in lines)
    assert lines[2]["offload/minimum_gib"] > lines[1]["offload/minimum_gib"], "the export counts in the iteration after it"


@pytest.fixture(scope="module")
def straight(task) -> Path:
    """The directory of a run that nothing happened to."""
    assert "checkpoint after 4 iterations: " in finished(launch(task, "straight"))
    return task.directory / "straight"


def test_a_killed_run_ends_with_the_bits_of_the_straight_one(task, straight, ranks, tmp_path):
    resumed = task.directory / "resumed"
    assert checkpoints(straight) == ["000002", "000004", "latest"]
    check_exports(ranks, straight, tmp_path / "exported")

    # Asked in the second iteration. Where the signal finds the ranks before the update, what they have made is left, with all that it
    # changed; where it finds them in it, the iteration is finished first.
    asked = launch(task, "resumed", {"stage": "score/critic", "iteration": 1, "rank": 0, "action": "term"})
    assert asked.wait(300) == 1, "torchrun's own status"
    done = len(metrics(resumed))
    told = f"stopped: the checkpoint after {done} iterations is in {resumed}/checkpoints; the same command goes on from there"
    assert done in (1, 2) and told in asked.output and "asked to stop: SIGTERM on rank 0" in asked.output, asked.output
    assert "Traceback" not in asked.output[: asked.output.index(told)] and "rlhf_mc: train: error" not in asked.output
    asked.seconds_until_gone(10)
    assert checkpoints(resumed) == [f"{done:06d}", "latest"]

    # torchrun starts all ranks again, over the store that the first ones used; the iteration beyond the checkpoint is made again.
    broken = launch(task, "resumed", MAX_RESTARTS="1")
    broken.wait_for("\n     2 ", 300)
    os.kill(broken.rank(1).pid, signal.SIGKILL)
    output = finished(broken)
    assert f"resumes from {resumed}/checkpoints/000002: 2 of 4 iterations are done" in output
    assert checkpoints(resumed) == checkpoints(straight)
    for file in (*MODELS, "samples.jsonl"):
        assert (resumed / file).read_bytes() == (straight / file).read_bytes(), file
    assert metrics(resumed) == metrics(straight) and len(metrics(straight)[0]) > 40
    assert " s in 3 attempts" in output[output.index("goodput: ") :]
    assert files(resumed / "exports") == files(straight / "exports")
    for file in sorted((straight / "checkpoints/000004").glob("*rank*")):
        assert (resumed / "checkpoints/000004" / file.name).read_bytes() == file.read_bytes(), file.name


def test_on_one_rank_and_then_on_four_it_is_the_same_run(task, straight):
    """From the checkpoint of two ranks one iteration on one; asked to stop in it, the last one on four."""
    resized = task.directory / "resized"
    shutil.copytree(straight / "checkpoints/000002", resized / "checkpoints/000002")
    asked = launch(task, "resized", {"stage": "update_actor", "iteration": 0, "rank": 0, "action": "term"}, ranks=1)
    assert asked.wait(300) == 1 and f"the checkpoint after 3 iterations is in {resized}" in asked.output, asked.output
    output = finished(launch(task, "resized", ranks=4))
    changes = [(2, 1, asked.output), (1, 4, output)]
    assert all(f"saved on {then} ranks, tensor 1" in told and f"; now {now} ranks, tensor 1" in told for then, now, told in changes)
    assert samples(resized) == samples(straight)[2:] and len(samples(resized)[0]) == 16
    for ours, theirs in zip(metrics(resized), metrics(straight)[2:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    for model in MODELS:
        ours, theirs = (load_file(run / model) for run in (resized, straight))
        assert all(torch.allclose(tensor, theirs[name], rtol=0, atol=1e-6) for name, tensor in ours.items()), model

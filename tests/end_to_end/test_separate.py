"""PPO with the engine on a rank of its own: the samples of a colocated run, a clean end, and no rank that survives another's death."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest
from end_to_end.job import Job, start
from end_to_end.task import Task, written
from end_to_end.test_killed_rank import SECONDS_TO_DIE
from end_to_end.test_ppo import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEPARATE = {"rollout.placement": "separate", "rollout.engine_ranks": "1"}


def run(task: Task, name: str, ranks: int, overrides: dict[str, str]) -> tuple[Run, Job]:
    directory = task.directory / name
    settings = task.overrides(directory) | {"trainer.iterations": "2", "rollout.dump": "true"} | overrides
    job = start(task.directory / f"{name}.log", "rlhf_mc.train", written(settings), ranks)
    assert job.wait(200) == 0, job.output
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return Run(directory, metrics, job.output, settings["actor.path"]), job


@pytest.fixture(scope="module")
def separate(task) -> tuple[Run, Job]:
    """A trainer and an engine, one rank each; with draft heads."""
    return run(task, "separate", 2, SEPARATE | {"medusa.enabled": "true", "medusa.drafted_tokens": "2"})


def token_ids(finished: Run, iteration: int) -> list[list[int]]:
    lines = (finished.directory / "rollouts" / f"{iteration:06d}.jsonl").read_text().splitlines()[1:]
    return [json.loads(line)["response_ids"] for line in lines]


def test_the_engine_computes_what_the_trainer_does_and_leaves_nothing(separate):
    finished, job = separate
    assert [line["iteration"] for line in finished.metrics] == [0, 1]
    for line in finished.metrics:
        assert 0 < line["training/rollout_logprobs_diff_max"] < 1e-5 and 0 < line["sync/probe_difference"] < 1e-5
        assert line["sync/received_bytes"] == line["sync/bound_bytes"] > 0
        assert line["medusa/drafted_tokens"] > 0 and line["medusa/grad_norm"] > 0
    assert abs(finished.metrics[1]["actor/reward_kl_penalty"]) > 1e-3, "the actor moved too little for a sync to show"
    assert "1 ranks and 1 for engines" in finished.output and "its whole shard" in finished.output
    assert job.processes() == [] and job.left_in_shared_memory() == []


def test_the_samples_are_those_of_a_colocated_run_without_drafts(task, separate):
    colocated, _ = run(task, "colocated", 1, {})
    for iteration in (0, 1):
        assert token_ids(separate[0], iteration) == token_ids(colocated, iteration)
    assert token_ids(colocated, 0) != token_ids(colocated, 1)


@pytest.fixture
def endless(task, tmp_path, request) -> Iterator[Job]:
    """A job that would run for hours; where the test names a side, a bug of that side ends it in the second iteration."""
    settings = task.overrides(tmp_path / "out") | SEPARATE | {"trainer.iterations": "100000", "data.validation": "[]"}
    side = getattr(request, "param", None)
    module = "tests.end_to_end.failing_side" if side else "rlhf_mc.train"
    job = start(tmp_path / "log", module, written(settings), environment={"FAILING_SIDE": side or ""})
    try:
        job.wait_for("     0 ", 200)
        yield job
    finally:
        job.kill()


def test_when_the_engine_rank_is_killed_all_end(endless):
    os.kill(endless.rank(1).pid, signal.SIGKILL)
    endless.seconds_until_gone(SECONDS_TO_DIE)
    assert endless.wait(5) != 0 and endless.left_in_shared_memory() == []


@pytest.mark.parametrize(("endless", "rank"), [("trainer", 0), ("engine", 1)], indirect=["endless"])
def test_an_error_on_one_side_ends_both_and_is_shown(endless, rank):
    assert endless.wait(60) != 0
    endless.seconds_until_gone(SECONDS_TO_DIE)
    side = ("trainer", "engine")[rank]
    assert f"rlhf_mc: train: error on rank {rank}:\nTraceback" in endless.output
    assert f"ZeroDivisionError: the bug of the {side}" in endless.output
    assert endless.output.count("rlhf_mc: train: error") == 1
    assert endless.left_in_shared_memory() == []

"""A rank, or torchrun itself, dies in the middle of PPO: all of the job is gone in seconds, and nothing of it is left.

And a rank that fails with an error: the job ends with that error, not in a collective that waits for it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator

import pytest
from end_to_end.job import Job, start
from end_to_end.task import written

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS_TO_DIE = 10.0
_SLOW = "def reward(sample):\n    import time\n    time.sleep(0.2)\n    return 1.0\n"


@pytest.fixture
def training(task, tmp_path, request) -> Iterator[Job]:
    """A job that would run for hours, and has finished its first iteration; with reward workers and wandb's process."""
    function = tmp_path / "slow.py"
    function.write_text(_SLOW)
    settings = task.overrides(tmp_path / "out") | {
        "parallel.tensor": "2",
        "rollout.tensor_parallel": "2",
        "trainer.iterations": "100000",
        "reward.functions": f'[{{path: "{function}:reward"}}]',
        "wandb.mode": "offline",
    }
    module = getattr(request, "param", "rlhf_mc.train")
    job = start(tmp_path / "log", module, written(settings))
    try:
        if module == "rlhf_mc.train":
            job.wait_for("     0 ", 300)
        yield job
    finally:
        job.kill()


def can_listen(port: int) -> bool:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen()
        except OSError:
            return False
    return True


def test_when_a_rank_is_killed_all_end_and_nothing_stays(training):
    port = int(training.rank(0).environment["MASTER_PORT"])
    programs = " ".join(process.command for process in training.processes())
    assert "rlhf_mc.rewards.worker" in programs and "wandb" in programs
    assert not can_listen(port) and training.left_in_shared_memory(), "there must be something to leave behind"
    os.kill(training.rank(1).pid, signal.SIGKILL)
    training.seconds_until_gone(SECONDS_TO_DIE)
    assert training.wait(5) != 0
    assert can_listen(port)
    assert training.left_in_shared_memory() == []


def test_when_torchrun_is_killed_all_end_and_nothing_stays(training):
    port = int(training.rank(0).environment["MASTER_PORT"])
    os.kill(training.torchrun().pid, signal.SIGKILL)
    training.seconds_until_gone(SECONDS_TO_DIE)
    assert can_listen(port)
    assert training.left_in_shared_memory() == []


@pytest.mark.parametrize("training", ["tests.end_to_end.failing_rank"], indirect=True)
def test_an_error_on_one_rank_ends_all_and_is_the_one_that_is_shown(training, tmp_path):
    training.wait_for("     0 ", 300)
    assert training.wait(120) != 0  # the bug comes in the second iteration
    training.seconds_until_gone(SECONDS_TO_DIE)
    told = training.output[training.output.find("rlhf_mc: train: error") :]
    assert told.startswith("rlhf_mc: train: error on rank 1:\nTraceback")
    assert "ZeroDivisionError: the bug of rank 1\non rank 1, in iteration 1, stage update_critic\n" in told
    assert told.count("rlhf_mc: train: error") == 1
    assert training.left_in_shared_memory() == []
    failed = [event for event in json.loads((tmp_path / "out/trace/rank1.json").read_text())["traceEvents"] if "error" in event["args"]]
    assert [(event["name"], event["args"]["error"]) for event in failed] == [("update_critic", "ZeroDivisionError")]

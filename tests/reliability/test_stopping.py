"""A signal is noted, not obeyed; and a rank whose sibling is gone ends though it waits. Ranks here are small processes of one parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_mc.reliability.statuses import FELLED, STOPPED

_RANK = """
import os, sys, time
from rlhf_mc.reliability import StopRequest
time.sleep(0.5)  # until the other one is there
stop = StopRequest.that_listens(lambda: os.path.exists(sys.argv[1]))
print("listens", flush=True)
for _ in range(300):
    time.sleep(0.1)
    if stop.asked:
        print(stop.name, flush=True)
        break
time.sleep(60)
"""


@pytest.fixture
def two(tmp_path) -> Iterator[list[subprocess.Popen]]:
    """Two ranks as torchrun starts them, which listen."""
    environment = os.environ | {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", _RANK, str(tmp_path / "over")]
    ranks = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [rank.stdout.readline() for rank in ranks] == ["listens\n"] * 2
    yield ranks
    for rank in ranks:
        rank.kill()
        rank.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_is_noted(two, number) -> None:
    for rank in two:
        rank.send_signal(number)
    assert [rank.stdout.readline() for rank in two] == [f"{number.name}\n"] * 2
    time.sleep(0.5)
    assert [rank.poll() for rank in two] == [None, None], "both go on"


def test_a_rank_that_is_asked_when_another_one_is_gone_ends(two) -> None:
    two[0].kill()
    time.sleep(0.3)
    assert two[1].poll() is None, "nobody asked it"
    two[1].send_signal(signal.SIGTERM)
    assert two[1].wait(5) == FELLED


def test_a_rank_is_told_that_the_run_is_over(two, tmp_path) -> None:
    two[1].send_signal(signal.SIGUSR1)
    (tmp_path / "over").touch()
    assert two[1].wait(5) == STOPPED and two[0].poll() is None

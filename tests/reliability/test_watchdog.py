"""The watchdog goes off in its time, names the place, and has every rank of the host write down its stacks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_mc.config import Watchdog as Limits
from rlhf_mc.reliability import Watchdog
from rlhf_mc.reliability.statuses import HUNG
from rlhf_mc.tracking import StageClock
from rlhf_mc.tracking.clock import Waiting

_RANK = """
import sys, time
from pathlib import Path
from rlhf_mc.config import Watchdog as Limits
from rlhf_mc.reliability import Watchdog
from rlhf_mc.tracking.clock import Waiting
rank, seconds, stacks = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
start = time.monotonic()
time.sleep(1.5)  # until the other one is there
look = lambda: Waiting(("train", "update_actor"), time.monotonic() - start, 0.1)
with Watchdog(Limits(seconds=seconds), rank, look, lambda: "the copy", stacks / f"rank{rank}.txt"):
    print("watches", flush=True)
    def asleep(): time.sleep(60)
    asleep()
"""


def test_it_ends_the_rank_and_every_rank_shows_its_stacks(tmp_path) -> None:
    """Rank 1 has a longer limit, and does not go off by itself."""
    environment = os.environ | {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x", "PYTHONPATH": str(Path(__file__).parents[2])}
    commands = [[sys.executable, "-c", _RANK, str(rank), str(seconds), str(tmp_path)] for rank, seconds in ((0, 5), (1, 500))]
    pipe = subprocess.PIPE
    ranks = [subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) for command in commands]
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["watches\n"] * 2
        assert ranks[0].wait(40) == HUNG
        told = ranks[0].stderr.read()
        assert "rlhf_mc: watchdog: rank 0 shows no sign of life for" in told and "train > update_actor" in told and "the copy" in told
        assert ranks[1].poll() is None
        for rank in (0, 1):
            assert "in asleep" in (tmp_path / f"rank{rank}.txt").read_text()
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_the_limit_follows_what_was_measured() -> None:
    dog = Watchdog(Limits(seconds=100.0, factor=10.0), 0, lambda: Waiting((), 0, 0), str, Path("unused"))
    assert dog.limit_of(Waiting(("score",), 0.0, 5.0)) == 100.0 and dog.limit_of(Waiting(("score",), 0.0, 50.0)) == 500.0


def test_stages_and_steps_are_signs_of_life() -> None:
    clock = StageClock()
    with clock.stage("make_experience"):
        time.sleep(0.4)
        with clock.stage("generate"):
            assert clock.waiting().stages == ("make_experience", "generate") and clock.waiting().seconds < 0.4
            time.sleep(0.4)
            assert clock.waiting().seconds >= 0.4
            clock.progress()
            waiting = clock.waiting()
            assert waiting.seconds < 0.4 <= waiting.longest and waiting.place == "make_experience > generate"
    assert clock.waiting().place == "between stages"
    assert clock.failed_in == "between stages"
    with pytest.raises(ValueError), clock.stage("train"), clock.stage("train/inner"):
        raise ValueError
    assert clock.failed_in == "train/inner"

"""The pool of ranks itself: a fault on a rank becomes an error here, soon, and the pool goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from ranks import Layout, RankError, RankPool

TWO = Layout(data=2)


def process_id(world) -> int:
    return os.getpid()


def raises_everywhere(world) -> None:
    raise ValueError("wrong on every rank")


def raises_on_rank_1(world) -> None:
    if world.rank == 1:
        raise ValueError("wrong on rank 1")
    wait_for_all(world)


def sleeps_on_rank_0(world) -> None:
    if world.rank == 0:
        time.sleep(60)
    wait_for_all(world)


def ends_on_rank_1(world) -> None:
    if world.rank == 1:
        os._exit(7)


def wait_for_all(world) -> None:
    import torch.distributed as dist

    dist.barrier(world.everyone)


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """A pool of its own, since it is broken here."""
    pool = RankPool()
    yield pool
    pool.close()


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def test_workers_stay_through_layouts_and_errors(pool: RankPool) -> None:
    first = pool.run("test_ranks:process_id", TWO)
    with pytest.raises(RankError, match="wrong on every rank"):
        pool.run("test_ranks:raises_everywhere", TWO)
    assert pool.run("test_ranks:process_id", Layout()) == first[:1]
    assert pool.run("test_ranks:process_id", Layout(tensor=2)) == first
    pool.close()
    assert not any(is_alive(pid) for pid in first)


def test_an_error_on_one_rank_ends_the_others(pool: RankPool) -> None:
    first = pool.run("test_ranks:process_id", TWO)
    with pytest.raises(RankError, match="(?s)rank 1 failed.*wrong on rank 1.*rank 0 was here:.*wait_for_all"):
        pool.run("test_ranks:raises_on_rank_1", TWO)
    assert not set(first) & set(pool.run("test_ranks:process_id", TWO))


def test_ranks_that_hang_are_killed_and_located(pool: RankPool) -> None:
    stacks = "(?s)not done after 2 s.*rank 0 was here:.*sleeps_on_rank_0.*rank 1 was here:.*wait_for_all"
    with pytest.raises(RankError, match=stacks):
        pool.run("test_ranks:sleeps_on_rank_0", TWO, timeout_seconds=2)
    assert len(pool.run("test_ranks:process_id", TWO)) == 2


def test_a_rank_that_dies_is_told(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 failed\nthe process ended with exit code 7"):
        pool.run("test_ranks:ends_on_rank_1", TWO)
    assert len(pool.run("test_ranks:process_id", TWO)) == 2

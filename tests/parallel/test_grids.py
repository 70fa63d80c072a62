"""The arithmetic of the rollout grid."""

from __future__ import annotations

import pytest

from rlhf_mc.config import ConfigError
from rlhf_mc.parallel.grids import RolloutGrid


@pytest.mark.parametrize(("world_size", "tensor"), [(1, 1), (4, 1), (4, 2), (4, 4), (6, 3)])
def test_every_rank_has_one_place(world_size, tensor):
    grids = [RolloutGrid(world_size, rank, tensor) for rank in range(world_size)]
    assert len({(grid.replica, grid.tensor_rank) for grid in grids}) == world_size
    for grid in grids:
        assert grid.ranks_of(grid.replica)[grid.tensor_rank] == grid.rank
    assert [rank for replica in range(grids[0].num_replicas) for rank in grids[0].ranks_of(replica)] == list(range(world_size))


def test_indivisible_ranks_are_refused():
    with pytest.raises(ConfigError, match="rollout.tensor_parallel: 4 ranks cannot be divided into replicas of 3"):
        RolloutGrid(4, 0, 3)


def test_a_rank_or_replica_outside_is_refused():
    with pytest.raises(ValueError, match="rank 4"):
        RolloutGrid(4, 4, 2)
    with pytest.raises(ValueError, match="replica 2"):
        RolloutGrid(4, 0, 2).ranks_of(2)

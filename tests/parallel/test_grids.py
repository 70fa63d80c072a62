"""The arithmetic of the two grids."""

from __future__ import annotations

import itertools

import pytest

from rlhf_mc.config import ConfigError
from rlhf_mc.parallel.grids import RolloutGrid, TrainingGrid

LAYOUTS = [  # world size, training TP, training PP, rollout TP
    (1, 1, 1, 1), (4, 1, 1, 1), (4, 2, 1, 1), (4, 2, 1, 2), (4, 4, 1, 2), (4, 2, 2, 1), (4, 2, 2, 2), (4, 2, 2, 4),
    (6, 2, 3, 3), (12, 2, 3, 3), (16, 2, 2, 2), (8, 1, 4, 2),
]  # fmt: skip


def grids(world_size: int, tensor: int, pipeline: int, rollout: int) -> list[RolloutGrid]:
    return [RolloutGrid(TrainingGrid(world_size, rank, tensor, pipeline), rollout) for rank in range(world_size)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_has_one_place(layout):
    found = grids(*layout)
    assert len({(grid.replica, grid.tensor_rank) for grid in found}) == layout[0]
    for grid in found:
        assert grid.ranks_of(grid.replica)[grid.tensor_rank] == grid.rank
        assert grid.shards_of_model()[grid.training.model_ranks().index(grid.rank)] == grid.tensor_rank
    assert sorted(rank for replica in range(found[0].num_replicas) for rank in found[0].ranks_of(replica)) == list(range(layout[0]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replica_lies_within_one_copy_of_the_trained_model(layout):
    for grid in grids(*layout):
        assert set(grid.ranks_of(grid.replica)) <= set(grid.training.model_ranks())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rollout_shard_contains_the_training_shard_where_the_sizes_allow(layout):
    _, tensor, _, rollout = layout
    for grid in grids(*layout):
        if tensor % rollout == 0:
            assert grid.training.tensor_rank * rollout // tensor == grid.tensor_rank
        elif rollout % tensor == 0:
            assert grid.tensor_rank * tensor // rollout == grid.training.tensor_rank


def test_replicas_lie_at_intervals_where_rollout_tp_is_smaller():
    grid = RolloutGrid(TrainingGrid(8, 0, 4, 1), 2)
    assert [grid.ranks_of(replica) for replica in range(4)] == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_context_ranks_are_copies_of_the_model():
    """To the engines they are what data-parallel ranks are."""
    for rank in range(16):
        grid = RolloutGrid(TrainingGrid(16, rank, tensor=2, pipeline=2, context=2), 2)
        plain = RolloutGrid(TrainingGrid(16, rank, tensor=2, pipeline=2), 2)
        assert (grid.training.data, grid.training.copies) == (2, 4)
        assert (grid.num_replicas, grid.replica, grid.tensor_rank) == (plain.num_replicas, plain.replica, plain.tensor_rank)
        assert grid.ranks_of(grid.replica) == plain.ranks_of(plain.replica)
        assert grid.training.model_ranks() == plain.training.model_ranks()


def test_places_in_the_training_grid():
    """Tensor rank changes fastest, then context rank, then data rank, then stage."""
    found = [TrainingGrid(16, rank, tensor=2, pipeline=2, context=2) for rank in range(16)]
    places = [(grid.stage, grid.data_rank, grid.context_rank, grid.tensor_rank) for grid in found]
    assert places == list(itertools.product(range(2), repeat=4))
    assert [grid.copy_rank for grid in found] == [0, 0, 1, 1, 2, 2, 3, 3] * 2


def test_indivisible_ranks_are_refused():
    with pytest.raises(ConfigError, match="rollout.tensor_parallel: the 4 ranks of one copy .* into replicas of 3 ranks"):
        RolloutGrid(TrainingGrid(4, 0, 2, 2), 3)
    with pytest.raises(ConfigError, match="4 ranks cannot be divided into tensor 3"):
        TrainingGrid(4, 0, 3, 1)


def test_a_rank_or_replica_outside_is_refused():
    with pytest.raises(ValueError, match="rank 4"):
        TrainingGrid(4, 4, 2, 1)
    with pytest.raises(ValueError, match="replica 2"):
        RolloutGrid(TrainingGrid(4, 0, 2, 1), 2).ranks_of(2)

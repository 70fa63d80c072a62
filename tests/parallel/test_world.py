"""A rank's place: the grid that we compute is the grid that megatron makes, and all ranks draw and sum alike."""

from __future__ import annotations

import pytest
import torch
from ranks import Layout, RankPool

from rlhf_mc.config import ConfigError
from rlhf_mc.parallel.grids import TrainingGrid

LAYOUTS = [
    Layout(),
    Layout(data=2),
    Layout(tensor=2, pipeline=2),
    Layout(tensor=2, data=2),
    Layout(pipeline=2, data=2),
    Layout(tensor=4),
    Layout(pipeline=4),
    Layout(context=2, data=2),
    Layout(tensor=2, context=2),
    Layout(context=2, pipeline=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_grid_is_megatrons(ranks: RankPool, layout: Layout) -> None:
    places = ranks.run("parallel.on_ranks:place", layout)
    for place in places:
        assert place["grid"] == place["megatron"]
    assert sum(place["speaks"] for place in places) == layout.data * layout.context


def test_all_ranks_draw_the_same_numbers(ranks: RankPool) -> None:
    drawn = ranks.run("parallel.on_ranks:drawn", Layout(tensor=2, data=2))
    assert len(set(drawn)) == 1
    assert len(set(drawn[0])) == 3


def test_sums_are_the_same_bits_on_every_rank(ranks: RankPool) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = ranks.run("parallel.on_ranks:summed", Layout(data=4), values=values)
    assert all(torch.equal(total, sums[0]) for total in sums)
    torch.testing.assert_close(sums[0], values * 10)


def test_all_ranks_learn_what_is_so_on_any(ranks: RankPool) -> None:
    for victim, found in ((None, False), (0, True), (3, True)):
        assert ranks.run("parallel.on_ranks:any_of_ranks", Layout(data=4), victim=victim) == [found] * 4


@pytest.mark.parametrize(("tensor", "pipeline", "context"), [(3, 1, 1), (2, 4, 1), (0, 1, 1), (1, 0, 1), (2, 1, 4), (1, 1, 3), (1, 1, 0)])
def test_ranks_that_cannot_be_divided_are_refused(tensor: int, pipeline: int, context: int) -> None:
    with pytest.raises(ConfigError, match="4 ranks"):
        TrainingGrid(4, 0, tensor, pipeline, context)

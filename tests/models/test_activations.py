"""Activations by formula are those that autograd saves, to the byte; recomputing saves what it says."""

from __future__ import annotations

import pytest
from ranks import Layout, RankPool
from tiny_models import random_batch

from rlhf_mc.models.activations import in_flight

LENGTHS = [500, 400, 448]  # no padding at the end; longer than what attention computes in fp32 on CPU
CASES = [
    ("llama", "language", "bf16"),
    ("llama", "value", "fp32"),
    ("qwen3", "language", "fp32"),
    ("qwen2", "language", "bf16"),
    ("mistral", "value", "bf16"),
]


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(tensor=2, pipeline=2), Layout(context=2)], ids=str)
def test_the_formula_finds_the_bytes_that_autograd_saves(ranks: RankPool, language_model, value_model, layout: Layout) -> None:
    for family, head, dtype in CASES:
        dtype = "fp32" if layout.context > 1 else dtype  # the keys of an early chunk are few
        directory = (value_model if head == "value" else language_model)(family)
        expands = head == "language" and layout.context > 1  # as a CUDA device makes attention do, where it has a mask
        arguments = dict(directory=directory, head=head, batch=random_batch(LENGTHS), dtype=dtype, expands_keys=expands)
        for rank, found in enumerate(ranks.run("models.activations_on_ranks:counted_and_predicted", layout, **arguments)):
            for recompute, (counted, predicted) in found.items():
                assert counted == predicted, (family, head, dtype, recompute, rank)


def test_a_schedule_keeps_as_many_micro_batches_as_the_formula_says(ranks: RankPool, language_model) -> None:
    """The first of two stages keeps two of them; with nothing computed again in between, the peak is exact but for the loss's own tensors."""
    arguments = dict(directory=language_model("llama"), batch=random_batch([300] * 4), recompute="none")
    for rank, (counted, predicted) in enumerate(ranks.run("models.activations_on_ranks:peak_of_schedule", Layout(pipeline=2), **arguments)):
        assert predicted <= counted <= 1.01 * predicted, rank
    interleaved = ranks.run("models.activations_on_ranks:peak_of_schedule", Layout(pipeline=2, virtual=2), **arguments)
    for rank, (counted, predicted) in enumerate(interleaved):
        assert 0.9 * counted <= predicted <= 1.1 * counted, (rank, counted, predicted)


def test_micro_batches_in_flight() -> None:
    assert [in_flight(stage, 4, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(stage, 4, 2) for stage in range(4)] == [2, 2, 2, 1], "no more than there are"
    assert [in_flight(stage, 4, 16, chunks=2) for stage in range(4)] == [11, 9, 7, 5]
    assert in_flight(0, 4, 4, chunks=2) == 8

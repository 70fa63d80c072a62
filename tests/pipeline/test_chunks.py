"""Chunks of a rollout: every sample in one, none empty, each as soon as it is complete."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mc.pipeline.chunks import Chunker


@st.composite
def exchanges(draw):
    """A rollout, its cut, and its samples in any order of finishing, in exchanges of any size, empty ones too."""
    prompts, per_prompt, chunks = draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.integers(1, 10))
    order = draw(st.permutations(range(prompts * per_prompt)))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=6)))
    bounds = [0, *cuts, len(order)]
    return prompts, per_prompt, chunks, [list(order[a:b]) for a, b in zip(bounds, bounds[1:])]


@given(exchanges(), st.sampled_from(["prompts", "finished"]))
def test_every_sample_is_in_one_chunk_and_none_is_empty(case, by):
    prompts, per_prompt, chunks, finished = case
    chunker = Chunker(prompts, per_prompt, chunks, by)
    made = [chunk for samples in finished for chunk in chunker.add(samples)]
    assert sorted(sample for chunk in made for sample in chunk) == list(range(prompts * per_prompt))
    assert [len(chunk) for chunk in made] == chunker.sizes and min(chunker.sizes) > 0
    assert all(list(chunk) == sorted(chunk) for chunk in made)
    assert len(made) == min(chunks, prompts if by == "prompts" else prompts * per_prompt)
    assert max(chunker.sizes) - min(chunker.sizes) <= (per_prompt if by == "prompts" else 1)


@given(exchanges())
def test_a_chunk_comes_with_the_exchange_that_completes_it(case):
    prompts, per_prompt, chunks, finished = case
    chunker = Chunker(prompts, per_prompt, chunks, "finished")
    seen = made = 0
    for samples in finished:
        seen += len(samples)
        made += len(chunker.add(samples))
        assert made == sum(sum(chunker.sizes[: count + 1]) <= seen for count in range(len(chunker.sizes)))


def test_chunks_of_prompts_keep_groups_whole_and_come_in_order():
    chunker = Chunker(4, 2, 2, "prompts")
    assert chunker.add([4, 5, 6, 7]) == []
    assert chunker.add([0, 1, 3]) == []
    assert chunker.add([2]) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_a_straggler_holds_back_the_last_chunk_only():
    chunker = Chunker(4, 1, 2, "finished")
    assert chunker.add([3, 1]) == [(1, 3)]
    assert chunker.add([2]) == []
    assert chunker.add([0]) == [(0, 2)]


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nothing_to_chunk_is_an_error(sizes):
    with pytest.raises(ValueError, match="each must be positive"):
        Chunker(*sizes, "prompts")

"""Which samples the steps of the heads take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlhf_mc.medusa.steps import first_within, samples_of_steps


def test_every_sample_belongs_to_one_step() -> None:
    steps = samples_of_steps(7, 3, seed=1, iteration=4)
    assert sorted(sample for samples in steps for sample in samples) == list(range(7))
    assert [len(samples) for samples in steps] == [3, 2, 2]
    assert steps == samples_of_steps(7, 3, seed=1, iteration=4)
    assert steps != samples_of_steps(7, 3, seed=1, iteration=5) and steps != samples_of_steps(7, 3, seed=2, iteration=4)
    assert samples_of_steps(2, 3, seed=1, iteration=0) in ([[0], [1]], [[1], [0]])


def test_a_step_takes_whole_samples_within_its_tokens() -> None:
    num_rows = {0: 4, 1: 0, 2: 3, 3: 2, 4: 9}
    assert first_within([2, 1, 0, 3], num_rows, step_tokens=7) == [2, 0]
    assert first_within([2, 1, 0, 3], num_rows, step_tokens=8) == [2, 0], "no later sample is drawn forward"
    assert first_within([2, 1, 0, 3, 5], num_rows, step_tokens=None) == [2, 0, 3]
    assert first_within([4, 2], num_rows, step_tokens=5) == [4], "the first in any case"
    assert first_within([1], num_rows, step_tokens=5) == []


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.sets(st.integers(0, 7)), st.integers(1, 20))
def test_what_a_rank_drops_no_step_takes(sizes: list[int], here: set[int], step_tokens: int) -> None:
    """A rank decides by the samples that it has seen so far, the steps by those of all ranks."""
    num_rows = dict(enumerate(sizes))
    seen = {sample: size for sample, size in num_rows.items() if sample in here}
    samples = range(len(sizes))
    taken = first_within(samples, num_rows, step_tokens)
    assert set(taken) & set(seen) <= set(first_within(samples, seen, step_tokens))

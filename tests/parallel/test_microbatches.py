"""The invariants of the micro-batch plan, as its docstring states them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mc.config import MicroBatch
from rlhf_mc.parallel.microbatches import PlannedMicrobatch, arrivals, plan_microbatches

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)
RANKS = st.integers(1, 5)


def check_shares(plan: list[list[PlannedMicrobatch]], num_sequences: int, num_ranks: int, multiple: int = 1) -> None:
    """What holds under every budget."""
    real = [m.sequences for share in plan for m in share if not m.fill]
    assert sorted(s for sequences in real for s in sequences) == list(range(num_sequences)), "each sequence is in one micro-batch"
    assert all(sequences for sequences in real), "no micro-batch is empty"
    assert len(plan) == num_ranks
    counts = {len(share) for share in plan}
    count = counts.pop()
    assert not counts and count >= 1 and count % multiple == 0, "all ranks have the same number, at least one"
    assert sum(m.fill for share in plan for m in share) < num_ranks * multiple, "no more fills than it takes"


def check_together(plan: list[list[PlannedMicrobatch]], together: int) -> None:
    for microbatch in (m for share in plan for m in share):
        for first in microbatch.sequences[::together]:
            assert first % together == 0
            assert set(range(first, first + together)) <= set(microbatch.sequences)


def square_costs(lengths: list[int]) -> list[int]:
    """A linear term and one of attention, which is the larger from 8 tokens on."""
    return [8 * n + n * n for n in lengths]


@given(LENGTHS, RANKS, st.integers(40, 200))
def test_by_tokens(lengths: list[int], num_ranks: int, tokens: int) -> None:
    plan = plan_microbatches(lengths, square_costs(lengths), MicroBatch(tokens=tokens), num_ranks)
    check_shares(plan, len(lengths), num_ranks)
    assert all(sum(lengths[s] for s in m.sequences) <= tokens for share in plan for m in share)


@given(LENGTHS, RANKS, st.integers(40, 200), st.integers(2, 4))
def test_in_rounds_of_an_interleaved_pipeline(lengths: list[int], num_ranks: int, tokens: int, multiple: int) -> None:
    """Sequences are spread over what a round has room for; it is filled up only where there are too few of them."""
    plan = plan_microbatches(lengths, square_costs(lengths), MicroBatch(tokens=tokens), num_ranks, multiple=multiple)
    check_shares(plan, len(lengths), num_ranks, multiple)
    assert all(sum(lengths[s] for s in m.sequences) <= tokens for share in plan for m in share)
    num_places = sum(map(len, plan))
    assert sum(m.fill for share in plan for m in share) == max(0, num_places - len(lengths))


@given(LENGTHS, RANKS, st.integers(1, 12))
def test_by_sequences(lengths: list[int], num_ranks: int, sequences: int) -> None:
    plan = plan_microbatches(lengths, square_costs(lengths), MicroBatch(tokens=None, sequences=sequences), num_ranks)
    check_shares(plan, len(lengths), num_ranks)
    assert all(len(m.sequences) <= sequences for share in plan for m in share)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), RANKS, st.integers(2, 3), st.booleans())
def test_neighbours_stay_together(lengths: list[int], num_ranks: int, together: int, by_tokens: bool) -> None:
    """As the two answers of a preference pair must."""
    lengths = lengths * together
    budget = MicroBatch(tokens=70) if by_tokens else MicroBatch(tokens=None, sequences=4)
    plan = plan_microbatches(lengths, square_costs(lengths), budget, num_ranks, together)
    check_shares(plan, len(lengths), num_ranks)
    check_together(plan, together)
    if by_tokens:
        assert all(sum(lengths[s] for s in m.sequences) <= 70 for share in plan for m in share)
    else:
        assert all(len(m.sequences) <= 4 for share in plan for m in share)


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(1e-3, 1e15)), min_size=1, max_size=60), RANKS, st.integers(40, 200))
def test_costs_need_not_follow_the_lengths(sequences: list[tuple[int, float]], num_ranks: int, tokens: int) -> None:
    lengths, costs = [list(values) for values in zip(*sequences)]
    plan = plan_microbatches(lengths, costs, MicroBatch(tokens=tokens), num_ranks)
    check_shares(plan, len(lengths), num_ranks)
    assert all(sum(lengths[s] for s in m.sequences) <= tokens for share in plan for m in share)


@given(LENGTHS, RANKS, st.integers(40, 200))
def test_the_plan_depends_on_its_arguments_only(lengths: list[int], num_ranks: int, tokens: int) -> None:
    costs = square_costs(lengths)
    first = plan_microbatches(lengths, costs, MicroBatch(tokens=tokens), num_ranks)
    assert first == plan_microbatches(tuple(lengths), tuple(costs), MicroBatch(tokens=tokens), num_ranks)
    assert first == plan_microbatches(lengths, [1024.0 * cost for cost in costs], MicroBatch(tokens=tokens), num_ranks), "the unit is free"


@given(LENGTHS, RANKS, st.integers(40, 200))
def test_the_dearest_come_first_and_fills_last(lengths: list[int], num_ranks: int, tokens: int) -> None:
    costs = square_costs(lengths)
    for share in plan_microbatches(lengths, costs, MicroBatch(tokens=tokens), num_ranks):
        loads = [0 if m.fill else sum(costs[s] for s in m.sequences) for m in share]
        assert loads == sorted(loads, reverse=True)


def test_one_token_beside_the_whole_budget() -> None:
    lengths = [1] * 40 + [4096]
    plan = plan_microbatches(lengths, square_costs(lengths), MicroBatch(tokens=4096), 2)
    check_shares(plan, 41, 2)
    assert plan[0][0].sequences == (40,) and plan[1][0].sequences == tuple(range(40))


def test_sequences_of_the_whole_budget() -> None:
    plan = plan_microbatches([4096] * 7, square_costs([4096] * 7), MicroBatch(tokens=4096), 3)
    check_shares(plan, 7, 3)
    assert all(len(m.sequences) == 1 for share in plan for m in share) and len(plan[0]) == 3


def test_a_fill_is_the_cheapest_sequence() -> None:
    plan = plan_microbatches([30, 10, 30], [3.0, 2.0, 1.0], MicroBatch(tokens=30), 2)
    fills = [m for share in plan for m in share if m.fill]
    assert fills == [PlannedMicrobatch((2,), fill=True)]


def test_more_ranks_than_sequences() -> None:
    plan = plan_microbatches([5], [1.0], MicroBatch(), 4)
    assert [[m.fill for m in share] for share in plan] == [[False], [True], [True], [True]]


def test_a_sequence_that_is_too_long_is_named() -> None:
    with pytest.raises(ValueError, match=r"sequence 2 has 33 tokens.*32.*micro_batch\.tokens"):
        plan_microbatches([4, 32, 33], [1.0] * 3, MicroBatch(tokens=32), 2)


def test_neighbours_that_are_too_long_together_are_named() -> None:
    with pytest.raises(ValueError, match=r"sequences 2 to 3 have 33 tokens.*32.*micro_batch\.tokens"):
        plan_microbatches([4, 4, 16, 17], [1.0] * 4, MicroBatch(tokens=32), 2, together=2)


def test_fewer_sequences_than_stay_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"micro_batch\.sequences.* 1 .* 2 "):
        plan_microbatches([4, 4], [1.0] * 2, MicroBatch(tokens=None, sequences=1), 1, together=2)


@pytest.mark.parametrize(("lengths", "together"), [([], 1), ([4, 4, 4], 2)])
def test_an_empty_batch_or_a_broken_pair_is_refused(lengths: list[int], together: int) -> None:
    with pytest.raises(ValueError, match=f"{len(lengths)} sequences"):
        plan_microbatches(lengths, [1.0] * len(lengths), MicroBatch(), 1, together)


def test_what_arrives_of_a_plain_pipeline() -> None:
    assert arrivals(3, pipeline=2, virtual=1, leads=False) == [0, 1, 2]
    assert arrivals(3, pipeline=2, virtual=1, leads=True) == [], "there is no stage before the first"


def test_what_arrives_of_an_interleaved_one() -> None:
    """Two micro-batches go twice around, then the next two; the first stage has the first time around from nobody."""
    assert arrivals(4, pipeline=2, virtual=2, leads=False) == [0, 1, 0, 1, 2, 3, 2, 3]
    assert arrivals(4, pipeline=2, virtual=2, leads=True) == [0, 1, 2, 3]
    assert arrivals(4, pipeline=2, virtual=3, leads=True) == [0, 1, 0, 1, 2, 3, 2, 3]

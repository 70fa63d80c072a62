"""Packing: nothing overlaps, nothing is lost, chunks keep to their size and can be shared out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlhf_mc.offload.layout import pack_numels, packed_bytes, round_up
from rlhf_mc.offload.prefetch import Prefetch
from rlhf_mc.offload.minimum import EMPTY, Visit
from rlhf_mc.offload.parts import TRAINING, Part
from rlhf_mc.offload.text import aligned, readable


NUMELS = st.lists(st.integers(1, 5000))


@given(NUMELS, st.sampled_from([2, 4]), st.integers(1, 40000), st.sampled_from([1, 64]), st.integers(1, 6))
def test_packed_tensors_are_apart_aligned_and_complete(numels, element_bytes, chunk_bytes, alignment, multiple):
    chunks = pack_numels(numels, element_bytes, chunk_bytes, alignment, multiple)
    assert [i for c in chunks for i in range(c.first, c.first + len(c.offsets))] == list(range(len(numels)))
    for chunk in chunks:
        sizes = numels[chunk.first : chunk.first + len(chunk.offsets)]
        ends = [start + n for start, n in zip(chunk.offsets, sizes)]
        assert all(end <= start for end, start in zip(ends, chunk.offsets[1:])) and ends[-1] <= chunk.numel
        assert all(start % alignment == 0 for start in chunk.offsets) and chunk.numel % (alignment * multiple) == 0
        padding = alignment * multiple * element_bytes
        assert len(sizes) == 1 or chunk.numel * element_bytes <= chunk_bytes + padding
    assert packed_bytes(numels, element_bytes, chunk_bytes, alignment, multiple) == element_bytes * sum(c.numel for c in chunks)


def test_round_up():
    assert [round_up(n, 64) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_the_schedule_goes_round_and_ignores_strangers():
    actor, critic = Visit("actor", Part.PARAMS, beside=Visit("medusa", Part.PARAMS)), Visit("critic", Part.PARAMS)
    training = Visit("critic", TRAINING, updates=True)
    prefetch = Prefetch([actor, EMPTY, critic, training])
    assert prefetch.after(actor) == EMPTY
    assert prefetch.after(critic) == training
    assert prefetch.after(Visit("reward_model", Part.PARAMS)) is None
    assert prefetch.after(Visit("actor", Part.PARAMS)) is None, "without the role that is beside it in the schedule"
    assert prefetch.after(Visit("critic", TRAINING)) == actor
    assert Prefetch([]).after(critic) is None


def test_bytes_and_tables_for_people():
    numbers = {7: "7 B", 999: "999 B", 1536: "1.50 KiB", 20 << 20: "20.0 MiB", 3 << 30: "3.00 GiB", 5000 << 30: "5000 GiB"}
    assert {n: readable(n) for n in numbers} == numbers
    assert aligned([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc  d"

"""Context parallel: the cut of packed sequences, and attention of queries on several ranks to the keys of all of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parallel.test_attention import HEAD_DIM, HEADS, KV_HEADS, one_by_one, random_qkv, tables, with_gradients
from ranks import Layout, RankPool

from rlhf_mc.batch import offsets_of, ragged_arange
from rlhf_mc.parallel.context import ContextCut, cut_sequences


@st.composite
def cuts(draw: st.DrawFn) -> ContextCut:
    """Lengths from 1 on; the last sequence is the padding, if there is any."""
    num_ranks = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    padding = -sum(lengths) % num_ranks
    return cut_sequences(torch.tensor(lengths + [padding] * bool(padding)), num_ranks)


@given(cuts())
def test_every_token_lies_on_one_rank_and_all_ranks_hold_equally_many(cut: ContextCut) -> None:
    total = int(cut.lengths.sum())
    assert torch.equal(cut.held.flatten().sort().values, torch.arange(total))
    assert (cut.held.diff(dim=1) > 0).all(), "order is kept"
    gathered = torch.arange(total)[cut.held.flatten()]
    assert torch.equal(gathered[cut.home], torch.arange(total))


@given(cuts())
def test_chunks_are_what_a_rank_holds(cut: ContextCut) -> None:
    offsets = offsets_of(cut.lengths)[:-1]
    for rank, (starts, sizes, held) in enumerate(zip(cut.starts, cut.sizes, cut.held)):
        firsts = (offsets[:, None] + starts).flatten().repeat_interleave(sizes.flatten())
        assert torch.equal(firsts + ragged_arange(sizes.flatten()), held)
        assert torch.equal(cut.positions(rank), held - offsets.repeat_interleave(sizes.sum(dim=1)))


@given(cuts())
def test_places_are_found_again_on_their_rank(cut: ContextCut) -> None:
    places = torch.arange(0, int(cut.lengths.sum()), 2)
    found = []
    for rank, held in enumerate(cut.held):
        mine, local = cut.on_rank(places, rank)
        assert torch.equal(held[local], places[mine])
        found.append(mine)
    assert torch.equal(torch.cat(found).sort().values, torch.arange(places.numel()))


@given(st.integers(1, 4000), st.integers(2, 8))
def test_causal_work_is_balanced(length: int, num_ranks: int) -> None:
    """The keys that a rank's queries see, of one sequence: they differ by less than three tokens' worth."""
    length += -length % num_ranks
    cut = cut_sequences(torch.tensor([length]), num_ranks)
    work = torch.stack([(cut.positions(rank) + 1).sum() for rank in range(num_ranks)])
    assert work.max() - work.min() <= 3 * length


def test_one_rank_holds_whole_sequences() -> None:
    cut = cut_sequences(torch.tensor([5, 1, 8]))
    assert torch.equal(cut.held, torch.arange(14)[None])
    assert cut.sizes.tolist() == [[[5, 0], [1, 0], [8, 0]]]


def test_head_and_tail_of_each_rank() -> None:
    cut = cut_sequences(torch.tensor([8]), 2)
    assert cut.held.tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_a_remainder_is_refused() -> None:
    with pytest.raises(ValueError, match="7 tokens cannot be cut evenly over 2"):
        cut_sequences(torch.tensor([3, 4]), 2)


CASES = {  # lengths, window, key/value heads
    "alike and unlike": ([24, 21, 9, 40, 2], None, KV_HEADS),
    "window": ([24, 21, 9, 40, 2], 5, KV_HEADS),
    "one head for all queries": ([17, 31], None, 1),
    "ungrouped": ([17, 31], 7, HEADS),
    "shorter than the ranks": ([1, 2, 3, 1, 1, 3, 2, 3], None, KV_HEADS),
    "shorter than the ranks, window": ([1, 2, 3, 1, 1, 3, 2, 3], 2, KV_HEADS),
}


@pytest.mark.parametrize("layout", [Layout(context=2), Layout(context=4)], ids=str)
def test_attention_is_that_of_one_rank(ranks: RankPool, layout: Layout) -> None:
    """Output, and the gradients of queries, keys and values, each on the rank that holds the token."""
    cos, sin = tables()
    for case, (lengths, window, kv_heads) in CASES.items():
        qkv = random_qkv(sum(lengths), kv_heads)
        arguments = dict(qkv=qkv, lengths=torch.tensor(lengths), window=window, cos=cos, sin=sin, head_dim=HEAD_DIM)
        parts = ranks.run("parallel.on_ranks:context_attention", layout, **arguments)
        for expected, *found in zip(with_gradients(one_by_one, qkv, lengths, window), *(part for _, part in parts)):
            whole = torch.full_like(expected, torch.nan)
            for (held, _), values in zip(parts, found):
                whole[held] = values
            torch.testing.assert_close(whole, expected, rtol=1e-10, atol=1e-10, msg=lambda m, case=case: f"{case}: {m}")


def test_a_nan_stays_in_its_sequence(ranks: RankPool) -> None:
    lengths, (cos, sin) = [8, 7, 8, 5], tables()
    qkv = random_qkv(sum(lengths))
    poisoned = [x.clone() for x in qkv]
    for x in poisoned:
        x[8:15] = torch.nan
    arguments = dict(lengths=torch.tensor(lengths), window=None, cos=cos, sin=sin, head_dim=HEAD_DIM)
    before, after = (
        ranks.run("parallel.on_ranks:context_attention", Layout(context=2), qkv=x, **arguments) for x in (qkv, poisoned)
    )
    for (held, expected), (_, found) in zip(before, after):
        elsewhere = (held < 8) | (held >= 15)
        assert not elsewhere.all()
        for a, b in zip(expected, found):
            assert torch.equal(a[elsewhere], b[elsewhere]) and b[~elsewhere].isnan().any()


def test_exchanged_numbers_and_their_gradient(ranks: RankPool) -> None:
    """Every rank has all numbers, and gets the gradient of its own once."""
    numbers, slopes = torch.arange(5.0), torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0])
    places = [torch.tensor([0, 3]), torch.tensor([1, 2, 4])]
    arguments = dict(numbers=numbers, slopes=slopes, places=places)
    for own, (whole, grad) in zip(places, ranks.run("parallel.on_ranks:exchanged", Layout(context=2), **arguments)):
        assert torch.equal(whole, numbers)
        assert torch.equal(grad, slopes[own])

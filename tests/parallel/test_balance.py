"""Costs against a count of every product and pair, and how even the shares are."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.parallel.balance import SequenceCost, share_out

SHAPE = ModelShape(
    family="llama", num_layers=4, hidden=16, num_heads=4, num_kv_heads=2, head_dim=8, ffn=24, vocab=101, norm_eps=1e-6,
    tied=True, qkv_bias=False, qk_norm=False, rope={}, sliding_window=None, max_positions=256, has_value_head=False,
)  # fmt: skip


@given(st.integers(1, 30), st.none() | st.integers(1, 40))
def test_a_pair_is_a_query_and_a_key_that_it_sees(length: int, window: int | None) -> None:
    pairs = sum(1 for query in range(length) for key in range(query + 1) if window is None or query - key < window)
    assert SequenceCost(per_token=0, per_pair=1, per_answer=0, window=window).of([length], [0]) == pairs


@pytest.mark.parametrize(("words", "pipeline"), list(product([True, False], [1, 2])))
def test_the_cost_is_that_of_all_products(words: bool, pipeline: int) -> None:
    """Of every matrix product that a sequence of 5 tokens with 3 answers goes through on the last stage."""
    tokens, answers, queries, keys = 5, 3, 4 * 8, 2 * 8
    linears = [(16, queries), (16, keys), (16, keys), (queries, 16), (16, 24), (16, 24), (24, 16)]
    seen = 1 + 2 + 3 + 4 + 5
    layer = tokens * sum(inputs * outputs for inputs, outputs in linears) + 2 * seen * queries
    head = answers * 16 * 101 if words else 0
    assert SHAPE.sequence_cost(words, pipeline).of([tokens], [answers]) == 2 * (4 // pipeline * layer + head)


def test_the_cost_takes_the_models_window() -> None:
    assert replace(SHAPE, sliding_window=7).sequence_cost(True, 1).window == 7


def response_lengths(generator: np.random.Generator, num: int) -> np.ndarray:
    """Prompt and a response as reinforcement learning meets them: lognormal, cut off at 4096."""
    return generator.integers(32, 512, num) + np.minimum(generator.lognormal(6, 1, num), 4096).astype(np.int64)


def chat_lengths(generator: np.random.Generator, num: int) -> np.ndarray:
    """A long tail: most are short, a few fill a micro-batch."""
    return np.minimum(20 + 200 * generator.pareto(1.2, num), 16384).astype(np.int64)


def uniform_lengths(generator: np.random.Generator, num: int) -> np.ndarray:
    return generator.integers(1, 8192, num)


@pytest.mark.parametrize("lengths_of", [response_lengths, chat_lengths, uniform_lengths])
@pytest.mark.parametrize(("num_ranks", "a_rank"), [(2, 32), (8, 8), (8, 64), (64, 16)])
def test_no_rank_costs_two_percent_more_than_it_must(lengths_of, num_ranks: int, a_rank: int) -> None:
    for seed, hidden in enumerate((896, 4096, 8192)):
        lengths = lengths_of(np.random.default_rng(seed), num_ranks * a_rank)
        model = SequenceCost(per_token=24 * hidden * hidden, per_pair=4 * hidden, per_answer=0, window=None)
        costs = model.of(lengths, 0 * lengths)
        ranks = share_out(lengths, costs, 16384, num_ranks)
        loads = [sum(costs[number] for units in bins for number in units) for bins in ranks]
        assert max(loads) <= 1.02 * max(costs.sum() / num_ranks, costs.max())


def test_bins_cost_alike_where_the_lengths_allow() -> None:
    """The k-th of all ranks and those of one rank: many short sequences, and room for a twentieth more."""
    lengths = np.random.default_rng(0).integers(64, 1024, 4096)
    costs = SequenceCost(per_token=1000, per_pair=1, per_answer=0, window=None).of(lengths, 0 * lengths)
    ranks = share_out(lengths, costs, int(lengths.sum() / 32 * 1.05), num_ranks=8)
    loads = np.array([[costs[units].sum() for units in bins] for bins in ranks])
    assert loads.shape == (8, 4) and loads.max() <= 1.01 * loads.min()


def test_a_long_sequence_weighs_more_than_its_tokens() -> None:
    """Two ranks, one sequence of 32 and 32 of one token: with costs s^2, the long one's rank gets nothing else."""
    lengths = [32] + [1] * 32
    ranks = share_out(lengths, [n * n for n in lengths], 64, num_ranks=2)
    assert sorted(ranks) == [[[0]], [list(range(1, 33))]]


def test_no_more_bins_than_best_fit_needs_where_they_are_even() -> None:
    ranks = share_out([3, 3, 2, 2, 2, 4], [1, 1, 1, 1, 1, 1], 4, num_ranks=2)
    assert [len(bins) for bins in ranks] == [3, 3] and all(sum([3, 3, 2, 2, 2, 4][u] for u in units) <= 4 for bins in ranks for units in bins)

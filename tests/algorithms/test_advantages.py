"""GAE, whitening and group baselines against plain loops, and by their properties."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mc.algorithms.advantages import gae, group_advantages, whiten
from rlhf_mc.batch import gather_segments

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=7).map(torch.tensor)
SEEDS = st.integers(0, 2**31)
FRACTIONS = st.floats(0, 1)


def normal(seed: int, size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def loop_gae(rewards, values, lengths, gamma, lam, bootstrap):
    """The definition: A_t = sum over l of (gamma lam)^l delta_(t+l)."""
    advantages, start = [], 0
    for b, n in enumerate(lengths.tolist()):
        r = rewards[start : start + n].tolist()
        v = values[start : start + n].tolist() + [float(bootstrap[b])]
        for t in range(n):
            advantages.append(sum((gamma * lam) ** (k - t) * (r[k] + gamma * v[k + 1] - v[k]) for k in range(t, n)))
        start += n
    return torch.tensor(advantages, dtype=torch.float64)


@given(LENGTHS, SEEDS, FRACTIONS, FRACTIONS)
def test_gae_equals_the_double_loop(lengths, seed, gamma, lam):
    total = int(lengths.sum())
    rewards, values, bootstrap = normal(seed, total), normal(seed + 1, total), normal(seed + 2, lengths.numel())
    advantages, returns = gae(rewards, values, lengths, gamma, lam, bootstrap)
    expected = loop_gae(rewards, values, lengths, gamma, lam, bootstrap)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + values)


@given(LENGTHS, SEEDS)
def test_gae_without_discount_is_the_reward_to_go_minus_the_value(lengths, seed):
    total = int(lengths.sum())
    rewards, values = normal(seed, total, torch.float32), normal(seed + 1, total, torch.float32)
    advantages, returns = gae(rewards, values, lengths, gamma=1.0, lam=1.0)
    to_go = torch.cat([part.flip(0).cumsum(0).flip(0) for part in rewards.split(lengths.tolist())])
    assert advantages.dtype == returns.dtype == torch.float32
    torch.testing.assert_close(returns, to_go, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(advantages, to_go - values, atol=1e-5, rtol=1e-5)


@given(LENGTHS, SEEDS)
def test_gae_with_lam_zero_is_the_temporal_difference(lengths, seed):
    total = int(lengths.sum())
    rewards, values = normal(seed, total), normal(seed + 1, total)
    advantages, _ = gae(rewards, values, lengths, gamma=0.9, lam=0.0)
    following = torch.cat([torch.cat([v[1:], v.new_zeros(min(1, v.numel()))]) for v in values.split(lengths.tolist())])
    torch.testing.assert_close(advantages, rewards + 0.9 * following - values)


@given(LENGTHS, SEEDS, st.randoms(use_true_random=False))
def test_gae_of_a_sequence_does_not_depend_on_the_others(lengths, seed, random):
    total = int(lengths.sum())
    rewards, values = normal(seed, total, torch.float32), normal(seed + 1, total, torch.float32)
    order = torch.tensor(random.sample(range(lengths.numel()), lengths.numel()))
    moved = [gather_segments(x, lengths, order) for x in (rewards, values)]
    expected = [gather_segments(x, lengths, order) for x in gae(rewards, values, lengths, 0.99, 0.95)]
    for got, want in zip(gae(*moved, lengths[order], 0.99, 0.95), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("broken", ["rewards", "values", "bootstrap"])
def test_gae_keeps_a_nan_in_its_sequence(broken):
    lengths = torch.tensor([3, 2, 0, 4])
    tensors = {"rewards": normal(1, 9), "values": normal(2, 9), "bootstrap": normal(3, 4)}
    clean, _ = gae(tensors["rewards"], tensors["values"], lengths, 1.0, 0.95, tensors["bootstrap"])
    tensors[broken][1 if broken == "bootstrap" else 4] = math.nan
    advantages, _ = gae(tensors["rewards"], tensors["values"], lengths, 1.0, 0.95, tensors["bootstrap"])
    assert advantages[3:5].isnan().any()
    others = [0, 1, 2, 5, 6, 7, 8]
    assert torch.equal(advantages[others], clean[others])


def test_gae_of_nothing_is_empty():
    for lengths in (torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)):
        advantages, returns = gae(torch.zeros(0), torch.zeros(0), lengths, 1.0, 0.95, torch.ones(lengths.numel()))
        assert advantages.shape == returns.shape == (0,)


def test_wrong_shapes_and_dtypes_are_refused_by_name():
    lengths = torch.tensor([2, 1])
    with pytest.raises(ValueError, match=r"values has shape \[1\], rewards \[3\]"):
        gae(torch.zeros(3), torch.zeros(1), lengths, 1.0, 0.95)
    with pytest.raises(ValueError, match="lengths sum to 3, but rewards has 4"):
        gae(torch.zeros(4), torch.zeros(4), lengths, 1.0, 0.95)
    with pytest.raises(ValueError, match="values is torch.bfloat16"):
        gae(torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16), lengths, 1.0, 0.95)
    with pytest.raises(ValueError, match="mask is torch.int64"):
        whiten(torch.zeros(3), torch.ones(3, dtype=torch.int64))


@given(SEEDS, st.lists(st.booleans(), min_size=2, max_size=40), st.floats(-100, 100), st.floats(0.01, 100))
def test_whitened_tokens_have_mean_zero_and_variance_one(seed, flags, shift, scale):
    mask = torch.tensor(flags + [True, True])
    x = normal(seed, mask.numel()) * scale + shift
    whitened = whiten(x, mask)
    inside = whitened[mask].tolist()
    assert statistics.fmean(inside) == pytest.approx(0, abs=1e-9)
    variance = statistics.variance(x[mask].tolist())
    assert statistics.variance(inside) == pytest.approx(variance / (variance + 1e-8), rel=1e-6)
    assert (whitened[~mask] == 0).all()


def test_whitening_ignores_what_is_masked_and_the_order():
    x = normal(1, 1000, torch.float32)
    mask = normal(2, 1000) > 0
    poisoned = torch.where(mask, x, math.nan)
    assert torch.equal(whiten(poisoned, mask), whiten(x, mask))
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(whiten(x[order], mask[order]), whiten(x, mask)[order], atol=0, rtol=1e-6)


def test_whitening_without_spread_gives_zero():
    x = torch.full((1000,), 0.1)
    assert (whiten(x, torch.ones(1000, dtype=torch.bool)).abs() < 1e-6).all()
    one = torch.zeros(3, dtype=torch.bool)
    one[1] = True
    assert torch.equal(whiten(torch.tensor([1.0, 5.0, 2.0]), one), torch.zeros(3))
    assert torch.equal(whiten(torch.tensor([1.0, 5.0]), torch.zeros(2, dtype=torch.bool)), torch.zeros(2))


def loop_group_advantage(scores, groups, b, estimator):
    others = [s for c, s in enumerate(scores) if groups[c] == groups[b] and c != b]
    if not others:
        return 0.0
    if estimator == "rloo":
        return scores[b] - statistics.fmean(others)
    group = [*others, scores[b]]
    return (scores[b] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6)


@given(SEEDS, st.lists(st.integers(0, 4), min_size=1, max_size=12), st.sampled_from(["grpo", "rloo"]))
def test_group_advantages_equal_the_loop(seed, groups, estimator):
    scores = normal(seed, len(groups))
    got = group_advantages(scores, torch.tensor(groups) * 7, estimator)
    expected = [loop_group_advantage(scores.tolist(), groups, b, estimator) for b in range(len(groups))]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_a_group_of_one_gives_zero_and_a_broken_group_stays_alone(estimator):
    groups = torch.tensor([5, 2, 2, 9, 9])
    advantages = group_advantages(torch.tensor([3.0, 0.5, 0.5, math.nan, 1.0]), groups, estimator)
    assert torch.equal(advantages[:3], torch.zeros(3))
    assert advantages[3:].isnan().all()
    empty = group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), estimator)
    assert empty.shape == (0,)


@pytest.mark.parametrize("size", [3, 7, 11, 64, 100])
def test_equal_scores_give_no_advantage_out_of_rounding(size):
    for score in (0.1, 0.7, 1 / 3):
        advantages = group_advantages(torch.full((size,), score), torch.zeros(size, dtype=torch.int64), "grpo")
        assert (advantages.abs() < 1e-6).all()


def test_unknown_group_estimator_is_refused():
    with pytest.raises(ValueError, match="'gpro' is unknown; choose grpo or rloo"):
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), "gpro")

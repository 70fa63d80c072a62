"""Losses against plain loops with the textbook's max(), and by what must hold for their sums and gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mc.algorithms.losses import (
    entropy_loss,
    kl_loss,
    language_model_loss,
    pairwise_loss,
    policy_loss,
    policy_terms,
    value_loss,
)

SEEDS = st.integers(0, 2**31)
SIZES = st.integers(1, 30)
CLIPS = st.sampled_from([(0.2, 0.2, 3.0), (0.2, 0.28, None), (0.1, 0.5, 1.5)])


def normal(seed: int, size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def policy_batch(seed: int, size: int):
    """new, old, advantages, mask: ratios on both sides of every bound."""
    old = -normal(seed, size).abs()
    return old + normal(seed + 1, size), old, normal(seed + 2, size), normal(seed + 3, size) > -0.5


def loop_policy(new, old, advantage, mask, low, high, dual):
    """(loss, d loss / d new) of one token, written as in the papers: max and min over the alternatives."""
    if not mask:
        return 0.0, 0.0
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 1 - low), 1 + high)
    loss = max(-advantage * ratio, -advantage * clipped)
    if dual is not None and advantage < 0:
        loss = min(loss, -advantage * dual)
    return loss, -advantage * ratio if loss == -advantage * ratio else 0.0


@given(SEEDS, SIZES, CLIPS)
def test_policy_loss_and_gradient_equal_the_loop(seed, size, clips):
    new, old, advantages, mask = policy_batch(seed, size)
    new.requires_grad_()
    sums = policy_loss(new, old, advantages, mask, *clips)
    sums.loss.backward()
    rows = zip(new.tolist(), old.tolist(), advantages.tolist(), mask.tolist(), strict=True)
    expected = [loop_policy(*row, *clips) for row in rows]
    assert sums.loss.item() == pytest.approx(sum(loss for loss, _ in expected))
    assert float(sums.stats["pg_loss"]) == sums.loss.item()
    assert int(sums.count) == int(mask.sum())
    torch.testing.assert_close(new.grad, torch.tensor([g for _, g in expected], dtype=torch.float64))


@given(SEEDS, SIZES, CLIPS)
def test_policy_stats_equal_the_loop(seed, size, clips):
    new, old, advantages, mask = policy_batch(seed, size)
    low, high, dual = clips
    stats = policy_loss(new, old, advantages, mask, *clips).stats
    ratios, signs = (new - old)[mask].exp().tolist(), advantages[mask].tolist()
    below = sum(a < 0 and r < 1 - low for r, a in zip(ratios, signs, strict=True))
    above = sum(a > 0 and r > 1 + high for r, a in zip(ratios, signs, strict=True))
    assert stats["ratio_clipped_low"] == below and stats["ratio_clipped_high"] == above
    assert stats["pg_clipfrac"] == below + above
    assert stats["pg_clipfrac_lower"] == sum(dual is not None and a < 0 and r > dual for r, a in zip(ratios, signs, strict=True))
    assert float(stats["ratio"]) == pytest.approx(sum(ratios))
    assert float(stats["ppo_kl"]) == pytest.approx(-sum(math.log(r) for r in ratios))
    assert all(s.dtype.is_floating_point and s.dim() == 0 and not s.requires_grad for s in stats.values())


def test_first_update_has_ratio_one_and_the_gradient_of_reinforce():
    old = -normal(1, 40, torch.float32).abs()
    advantages, mask = normal(2, 40, torch.float32), normal(3, 40) > 0
    new = old.clone().requires_grad_()
    sums = policy_loss(new, old, advantages, mask, 0.2, 0.2, 3.0)
    sums.loss.backward()
    assert sums.stats["ratio"] == sums.count and sums.stats["ppo_kl"] == 0 and sums.stats["pg_clipfrac"] == 0
    assert sums.loss.item() == pytest.approx(-float(advantages[mask].sum()), rel=1e-6)
    again = old.clone().requires_grad_()
    (-again * advantages)[mask].sum().backward()
    assert torch.equal(new.grad, again.grad)


@given(SEEDS, SIZES, st.floats(1.3, 5))
def test_dual_clip_bounds_the_loss_of_bad_actions(seed, size, dual):
    new, old, advantages, mask = policy_batch(seed, size)
    terms = policy_terms(new * 3, old, advantages, mask, 0.2, 0.2, dual)
    negative = mask & (advantages < 0)
    assert (terms.loss[negative] <= -dual * advantages[negative] * (1 + 1e-12)).all()
    assert torch.equal(terms.clipped_dual, negative & (terms.ratio > dual))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_that_overflows_is_held_with_gradient_zero(advantage):
    new = torch.tensor([0.0], requires_grad=True)
    sums = policy_loss(new, torch.tensor([-200.0]), torch.tensor([advantage]), torch.tensor([True]), 0.2, 0.2, 3.0)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(-1.2 if advantage > 0 else 3.0)
    assert float(new.grad) == 0


def loop_value(new, old, target, mask, clip):
    """(loss, d loss / d new) of one token."""
    if not mask:
        return 0.0, 0.0
    plain = 0.5 * (new - target) ** 2
    if clip is None:
        return plain, new - target
    held = 0.5 * (min(max(new, old - clip), old + clip) - target) ** 2
    return (held, 0.0) if abs(new - old) > clip and held > plain else (plain, new - target)


@given(SEEDS, SIZES, st.sampled_from([None, 0.2, 1.0]))
def test_value_loss_and_gradient_equal_the_loop(seed, size, clip):
    old, returns, mask = normal(seed, size), normal(seed + 1, size), normal(seed + 2, size) > -0.5
    new = (old + normal(seed + 3, size)).requires_grad_()
    sums = value_loss(new, old, returns, mask, clip)
    sums.loss.backward()
    rows = list(zip(new.tolist(), old.tolist(), returns.tolist(), mask.tolist(), strict=True))
    expected = [loop_value(*row, clip) for row in rows]
    assert sums.loss.item() == pytest.approx(sum(loss for loss, _ in expected))
    torch.testing.assert_close(new.grad, torch.tensor([g for _, g in expected], dtype=torch.float64))
    assert float(sums.stats["vpred_mean"]) == pytest.approx(sum(v for v, _, _, m in rows if m))
    assert sums.stats["vf_clipfrac"] == sum(g == 0 and m for (_, g), (*_, m) in zip(expected, rows, strict=True))


def test_values_within_the_clip_range_are_not_counted_as_clipped_by_rounding():
    old, returns = normal(1, 1000, torch.float32) * 1e-3, normal(2, 1000, torch.float32)
    new = 0.1 * normal(3, 1000, torch.float32).clamp(-1, 1)
    assert value_loss(new, old, returns, torch.ones(1000, dtype=torch.bool), 0.2).stats["vf_clipfrac"] == 0


def losses_of(new, old, other, mask):
    """Every loss over tokens, each from the same four tensors."""
    return {
        "policy": policy_loss(new, old, other, mask, 0.2, 0.2, 3.0),
        "value": value_loss(new, old, other, mask, 0.2),
        "entropy": entropy_loss(new, mask),
        "k2": kl_loss(new, old, mask, "k2"),
        "k3": kl_loss(new, old, mask, "k3"),
        "pairwise": pairwise_loss(new, old, mask),
        "language_model": language_model_loss(new, mask),
    }


@given(SEEDS, st.lists(st.integers(0, 6), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_sums_do_not_depend_on_order_or_micro_batches(seed, lengths, random):
    total = sum(lengths)
    tensors = policy_batch(seed, total)
    micro_batches = list(zip(*(t.split(lengths) for t in tensors), strict=True))
    random.shuffle(micro_batches)
    parts = [losses_of(*micro_batch) for micro_batch in micro_batches]
    for name, whole in losses_of(*tensors).items():
        assert sum(p[name].loss for p in parts).item() == pytest.approx(whole.loss.item(), abs=1e-12)
        assert sum(p[name].count for p in parts) == whole.count
        for stat, value in whole.stats.items():
            assert sum(p[name].stats[stat] for p in parts).item() == pytest.approx(value.item(), abs=1e-12)


def test_nan_in_masked_cells_reaches_neither_sums_nor_gradients():
    new, old, other, mask = policy_batch(5, 40)
    clean = losses_of(new, old, other, mask)
    poisoned = [torch.where(mask, t, math.nan) for t in (new, old, other)]
    leaf = poisoned[0].requires_grad_()
    for name, sums in losses_of(leaf, *poisoned[1:], mask).items():
        assert torch.equal(sums.loss.detach(), clean[name].loss), name
        assert sums.stats == clean[name].stats, name
        (gradient,) = torch.autograd.grad(sums.loss, leaf)
        assert gradient.isfinite().all() and (gradient[~mask] == 0).all() and (gradient[mask] != 0).any(), name


def test_an_all_masked_micro_batch_adds_zero_but_keeps_its_graph():
    """A rank with nothing left to train still runs a real backward, so that collectives match."""
    new, old, other, _ = policy_batch(6, 5)
    nothing = torch.zeros(5, dtype=torch.bool)
    leaf = new.requires_grad_()
    for name, sums in losses_of(leaf, old, other, nothing).items():
        (gradient,) = torch.autograd.grad(sums.loss, leaf)
        assert sums.loss == 0 and sums.count == 0 and torch.equal(gradient, torch.zeros(5, dtype=torch.float64)), name


def test_plus_weighs_the_loss_and_keeps_stats_apart():
    new, old, advantages, mask = policy_batch(7, 20)
    policy = policy_loss(new, old, advantages, mask, 0.2, 0.2, 3.0)
    entropy = entropy_loss(-new, mask)
    kl = kl_loss(new, old, mask, "k3")
    total = policy.plus(entropy, weight=0.01).plus(kl, weight=0.5)
    assert float(total.loss) == pytest.approx(float(policy.loss) - 0.01 * float((-new)[mask].sum()) + 0.5 * float(kl.loss))
    assert total.count == policy.count
    assert total.stats == policy.stats | entropy.stats | kl.stats
    with pytest.raises(ValueError, match=r"both losses carry \['entropy'\]"):
        entropy.plus(entropy, weight=1.0)


def test_entropy_is_a_bonus():
    entropies = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    sums = entropy_loss(entropies, torch.tensor([True, False, True]))
    sums.loss.backward()
    assert sums.loss == -5 and sums.stats["entropy"] == 5
    assert entropies.grad.tolist() == [-1.0, 0.0, -1.0]


@given(SEEDS, SIZES)
def test_pairwise_loss_equals_the_loop(seed, size):
    chosen, rejected = normal(seed, size), normal(seed + 1, size)
    sums = pairwise_loss(chosen, rejected)
    margins = (chosen - rejected).tolist()
    assert sums.loss.item() == pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins))
    assert sums.stats["accuracy"] == sum(m > 0 for m in margins)
    assert float(sums.stats["margin"]) == pytest.approx(sum(margins), abs=1e-12)
    assert int(sums.count) == size


def test_pairwise_loss_is_finite_far_out_and_a_tie_is_wrong():
    chosen = torch.tensor([-500.0, 500.0, 0.0], requires_grad=True)
    sums = pairwise_loss(chosen, torch.tensor([500.0, -500.0, 0.0]))
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(1000 + math.log(2))
    assert chosen.grad.tolist() == pytest.approx([-1.0, 0.0, -0.5])
    assert sums.stats["accuracy"] == 1


def test_language_model_loss_is_cross_entropy():
    logits = normal(1, 5 * 11).view(5, 11)
    targets, mask = torch.tensor([3, 0, 10, 4, 4]), torch.tensor([True, True, False, True, True])
    logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    expected = torch.nn.functional.cross_entropy(logits[mask], targets[mask], reduction="sum")
    assert float(language_model_loss(logprobs, mask).loss) == pytest.approx(float(expected))


def test_gradients_equal_finite_differences():
    new, old, other, mask = policy_batch(8, 12)
    leaf = new.requires_grad_()
    for name in losses_of(new, old, other, mask):
        assert torch.autograd.gradcheck(lambda x, name=name: losses_of(x, old, other, mask)[name].loss, leaf), name


def test_broadcasting_and_low_precision_are_refused():
    tokens, mask = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"advantages has shape \[1\], new_logprobs \[4\]"):
        policy_loss(tokens, tokens, torch.zeros(1), mask, 0.2, 0.2, 3.0)
    with pytest.raises(ValueError, match="new_logprobs is torch.bfloat16"):
        policy_loss(tokens.bfloat16(), tokens, tokens, mask, 0.2, 0.2, 3.0)
    with pytest.raises(ValueError, match=r"mask is torch.bool \[1\]"):
        value_loss(tokens, tokens, tokens, mask[:1], None)

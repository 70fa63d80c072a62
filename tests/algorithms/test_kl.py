"""KL estimates, their gradients against the true KL, the controller, and where rewards are put."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mc.algorithms.kl import KLController, kl_estimate, mean_sequence_kl, token_rewards
from rlhf_mc.config import KL, ConfigError

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=6).map(torch.tensor)
SEEDS = st.integers(0, 2**31)


def logprobs(seed: int, size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return -torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 5


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimates_are_exactly_zero_at_equality(estimator):
    x = logprobs(1, 50, torch.float32)
    assert torch.equal(kl_estimate(x, x.clone(), estimator), torch.zeros(50))


@given(st.floats(-30, 0, width=32), st.floats(-30, 30, width=32))
def test_estimates_equal_their_formulas_and_k2_k3_are_not_negative(logprob, shift):
    policy = torch.tensor([logprob], dtype=torch.float32)
    reference = policy + shift
    d = float(policy.double() - reference.double())
    got = {k: float(kl_estimate(policy, reference, k)) for k in ("k1", "k2", "k3")}
    assert got["k1"] == pytest.approx(d, rel=1e-6)
    assert got["k2"] == pytest.approx(d * d / 2, rel=1e-6)
    assert got["k3"] == pytest.approx(math.expm1(-d) + d, rel=1e-6)
    assert got["k2"] >= 0 and got["k3"] >= 0


def test_k3_keeps_its_digits_near_zero():
    reference = torch.linspace(-3, -1, 1001)
    policy = reference + 1e-4
    d = policy.double() - reference.double()
    torch.testing.assert_close(kl_estimate(policy, reference, "k3"), (d * d / 2 - d**3 / 6).float(), rtol=1e-5, atol=0)


def expected_gradient(estimator, logits, ref):
    """Gradient of the estimate, averaged exactly over tokens drawn from the policy itself."""
    log_policy = logits.log_softmax(0)
    weights = log_policy.detach().exp()
    (weights * kl_estimate(log_policy, ref, estimator)).sum().backward()
    return logits.grad


def true_gradient(kl, logits):
    (gradient,) = torch.autograd.grad(kl(logits.log_softmax(0)), logits)
    return gradient


@given(SEEDS, st.integers(2, 8))
def test_gradients_on_policy_are_those_of_the_true_divergences(seed, vocabulary):
    def fresh():
        return logprobs(seed, vocabulary).requires_grad_()

    ref = logprobs(seed + 1, vocabulary).log_softmax(0)
    reverse = true_gradient(lambda p: (p.exp() * (p - ref)).sum(), fresh())
    forward = true_gradient(lambda p: (ref.exp() * (ref - p)).sum(), fresh())
    torch.testing.assert_close(expected_gradient("k2", fresh(), ref), reverse)
    torch.testing.assert_close(expected_gradient("k3", fresh(), ref), forward)
    torch.testing.assert_close(expected_gradient("k1", fresh(), ref), torch.zeros_like(reverse))


@pytest.mark.parametrize(("estimator", "slope"), [("k2", -20.0), ("k3", 1 - math.exp(20.0))])
def test_the_gradient_still_pulls_far_from_the_reference(estimator, slope):
    policy = torch.tensor([-25.0], requires_grad=True)
    kl_estimate(policy, torch.tensor([-5.0]), estimator).sum().backward()
    assert float(policy.grad) == pytest.approx(slope)


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="'k4' is unknown; choose k1, k2 or k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_mean_sequence_kl_weighs_sequences_not_tokens():
    policy, reference = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-2.0, -2.0, -5.0])
    assert mean_sequence_kl(policy, reference, torch.tensor([2, 1, 0])) == pytest.approx((2 + 4 + 0) / 3)


def test_the_controller_is_proportional_and_its_error_is_clipped():
    controller = KLController(coef=0.1, target=6.0, horizon=1000)
    assert controller.after(6.0, 100).coef == 0.1
    assert controller.after(6.6, 100).coef == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    assert controller.after(600.0, 100).coef == pytest.approx(0.1 * 1.02)
    assert controller.after(-600.0, 100).coef == pytest.approx(0.1 * 0.98)


def test_the_controller_from_settings_starts_at_coef_and_stays_there_without_a_target():
    fixed = KLController.from_settings(KL(coef=0.03))
    assert fixed.after(math.nan, 64) == fixed == KLController(coef=0.03, target=None, horizon=10000)
    adaptive = KLController.from_settings(KL(coef=0.03, target=2.0, horizon=500))
    assert adaptive == KLController(coef=0.03, target=2.0, horizon=500)


def test_the_controller_reaches_its_target():
    """A policy whose KL is 1 / coef settles where the KL is the target."""
    controller = KLController(coef=0.05, target=5.0, horizon=100)
    for _ in range(400):
        controller = controller.after(1 / controller.coef, 64)
    assert 1 / controller.coef == pytest.approx(5.0, rel=1e-3)


def test_the_controller_refuses_a_broken_kl_and_a_horizon_below_one_iteration():
    controller = KLController(coef=0.1, target=6.0, horizon=50)
    for kl in (math.nan, math.inf):
        with pytest.raises(ValueError, match="measured KL to the reference is (nan|inf)"):
            controller.after(kl, 10)
    with pytest.raises(ConfigError, match="algorithm.kl.horizon: 50 is less than the 64 sequences"):
        controller.after(6.0, 64)


@given(LENGTHS, SEEDS, st.floats(0, 1), st.booleans())
def test_token_rewards_equal_the_loop(lengths, seed, coef, dense):
    total = int(lengths.sum())
    old, ref, scores = logprobs(seed, total), logprobs(seed + 1, total), logprobs(seed + 2, lengths.numel())
    token_scores = logprobs(seed + 3, total) if dense else None
    expected, position = [], 0
    for b, n in enumerate(lengths.tolist()):
        for t in range(n):
            reward = -coef * float(old[position] - ref[position]) + (float(token_scores[position]) if dense else 0)
            expected.append(reward + (float(scores[b]) if t == n - 1 else 0))
            position += 1
    got = token_rewards(scores, old, ref, coef, lengths, token_scores)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_a_nan_score_pays_nobody_else_and_coef_zero_reads_no_logprob():
    lengths = torch.tensor([2, 0, 1, 0])
    scores = torch.tensor([1.0, math.nan, 3.0, 4.0])
    broken = torch.full((3,), -math.inf)
    rewards = token_rewards(scores, broken, broken, 0.0, lengths)
    assert rewards.tolist() == [0.0, 1.0, 3.0]
    scores[0] = math.nan
    assert token_rewards(scores, torch.zeros(3), torch.ones(3), 0.5, lengths).nan_to_num(nan=99).tolist() == [0.5, 99.0, 3.5]

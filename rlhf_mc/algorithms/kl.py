"""The distance to the reference policy: per-token estimates, the coefficient's controller, and KL inside the reward.

KL as a loss is `losses.kl_loss`, made of the same estimates. Shapes: legend in `rlhf_mc/batch.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rlhf_mc.algorithms.contract import require_flat
from rlhf_mc.batch import segment_sum
from rlhf_mc.config import KL, ConfigError

MAX_CONTROLLER_ERROR = 0.2


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimates [R], in nats, of KL(policy || reference) at tokens sampled from the policy; differentiable in `logprobs`.

    With d = logprobs - ref_logprobs (http://joschu.net/blog/kl-approx.html):
        k1 = d               unbiased, either sign, mean gradient 0: for the reward, never for a loss
        k2 = d^2 / 2         biased, >= 0, its mean gradient is that of KL(policy || reference)
        k3 = exp(-d) - 1 + d unbiased, >= 0, its mean gradient is that of KL(reference || policy)
    Nothing is clamped, so the gradient pulls at every distance. k3 is infinite in float32 from d = -88 on, where the
    policy has left a token of the reference by that many nats: the update's check for finite numbers must see it.
    """
    require_flat(logprobs=logprobs, ref_logprobs=ref_logprobs)
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        exact = difference.double()  # near 0 the terms cancel: float32 would leave noise of either sign
        return (torch.expm1(-exact) + exact).to(difference.dtype)
    raise ValueError(f"KL estimator '{estimator}' is unknown; choose k1, k2 or k3")


def mean_sequence_kl(old_logprobs: Tensor, ref_logprobs: Tensor, response_lengths: Tensor) -> float:
    """Mean over sequences of the k1 estimate summed over a response, in nats: what `KLController` steers."""
    require_flat(response_lengths, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)
    token_kl = kl_estimate(old_logprobs, ref_logprobs, "k1").double()
    return float(segment_sum(token_kl, response_lengths).mean())


@dataclass(frozen=True)
class KLController:
    """The KL coefficient over the iterations. `coef` is all its state; `target` None keeps it fixed.

    Adaptive: the proportional controller of arXiv:1909.08593, section 2.2. `target` is nats per sequence; over
    `horizon` sequences the coefficient changes by at most about 20 %.
    """

    coef: float
    target: float | None = None
    horizon: int = 10000

    @classmethod
    def from_settings(cls, kl: KL) -> KLController:
        """The controller at the start of a run."""
        return cls(coef=kl.coef, target=kl.target, horizon=kl.horizon)

    def after(self, sequence_kl: float, num_sequences: int) -> KLController:
        """The controller after an iteration of `num_sequences` whose mean KL per sequence was `sequence_kl` nats.

        ValueError if the measured KL is not finite: it would stay in the coefficient for the rest of the run.
        ConfigError if the iteration is longer than the horizon: one step could then turn the coefficient negative.
        """
        if self.target is None:
            return self
        if num_sequences > self.horizon:
            raise ConfigError(
                f"algorithm.kl.horizon: {self.horizon} is less than the {num_sequences} sequences of one iteration; raise it"
            )
        if not math.isfinite(sequence_kl):
            raise ValueError(f"the measured KL to the reference is {sequence_kl}; the log-probs of this iteration are broken")
        error = sequence_kl / self.target - 1
        error = max(-MAX_CONTROLLER_ERROR, min(MAX_CONTROLLER_ERROR, error))
        return replace(self, coef=self.coef * (1 + error * num_sequences / self.horizon))


@torch.no_grad()
def token_rewards(
    scores: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    coef: float,
    response_lengths: Tensor,
    token_scores: Tensor | None = None,
) -> Tensor:
    """Rewards [R]: at each token -coef * k1 (+ token_scores [R]), and the score [B] at each response's last token.

    response_lengths: int64[B]. An empty response has no token that could be paid. coef 0 reads no log-prob.
    """
    require_flat(response_lengths, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)
    rewards = torch.zeros_like(old_logprobs)
    if coef != 0:
        rewards -= coef * kl_estimate(old_logprobs, ref_logprobs, "k1")
    if token_scores is not None:
        require_flat(old_logprobs=old_logprobs, token_scores=token_scores)
        rewards += token_scores
    paid = response_lengths > 0
    last_positions = response_lengths.cumsum(0)[paid] - 1
    return rewards.index_add_(0, last_positions, scores[paid].to(rewards.dtype))

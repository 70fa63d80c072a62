"""Losses as sums over the tokens that train, so that one global count can divide them.

No function here divides: sum over micro-batches and ranks, then divide by the count of the whole mini-batch, and
neither packing nor layout shows. Masked cells are taken out with `where` before any arithmetic that could turn
their NaN into a NaN gradient. Shapes: legend in `rlhf_mc/batch.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_mc.algorithms.contract import require_flat
from rlhf_mc.algorithms.kl import kl_estimate


@dataclass(frozen=True)
class LossSums:
    """What one micro-batch adds to a loss.

    loss: scalar with gradient, a sum over `count` items.  count: int64 scalar, tokens (or pairs) in the mask.
    stats: verl's metric names without the role's prefix -> detached scalar sums over the same items.
    """

    loss: Tensor
    count: Tensor
    stats: dict[str, Tensor]

    def plus(self, other: LossSums, weight: float) -> LossSums:
        """This loss + weight * another of the same items (entropy, KL). Stats stay unweighted, side by side."""
        if repeated := self.stats.keys() & other.stats.keys():
            raise ValueError(
                f"both losses carry {sorted(repeated)}; plus() joins two losses of the same tokens, not two micro-batches"
            )
        return replace(self, loss=self.loss + weight * other.loss, stats=self.stats | other.stats)


@dataclass(frozen=True)
class PolicyTerms:
    """PPO's objective per response token, all [R]. A masked token has loss 0, log_ratio 0, ratio 1 and no flag.

    Only `loss` carries a gradient. A flagged token has none: its loss is at the bound.
    """

    loss: Tensor
    log_ratio: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor


def _sums(mask: Tensor, **per_item: Tensor) -> dict[str, Tensor]:
    """Detached sums over the mask, all of them floats (flags count as 0 and 1), so that one all-reduce can take them."""
    zero = torch.zeros((), device=mask.device)
    return {name: torch.where(mask, values.detach(), zero).sum() for name, values in per_item.items()}


def policy_terms(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyTerms:
    """Clipped surrogate (arXiv:1707.06347) with separate bounds (arXiv:2503.14476) and dual clip (arXiv:1912.09729).

    With ratio r = exp(new - old), the loss is -A r, but held at its value on the bound where
        A > 0 and r > 1 + clip_high,   A < 0 and r < 1 - clip_low,   A < 0 and r > dual_clip.
    All tensors [R]; mask bool.
    """
    require_flat(mask=mask, new_logprobs=new_logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = torch.where(mask, new_logprobs - old_logprobs, 0.0)
    advantages = torch.where(mask, advantages, 0.0)
    ratio = log_ratio.detach().exp()
    bound = ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped_low = (advantages < 0) & (ratio < 1 - clip_low)
    clipped_high = (advantages > 0) & (ratio > 1 + clip_high)
    clipped_dual = torch.zeros_like(mask)
    if dual_clip is not None:
        clipped_dual = (advantages < 0) & (ratio > dual_clip)
        bound = torch.where(clipped_dual, dual_clip, bound)
    held = clipped_low | clipped_high | clipped_dual
    # exp() must not see a held token: where it overflows, its gradient 0 * inf would be NaN.
    live_ratio = torch.where(held, 0.0, log_ratio).exp()
    loss = -advantages * torch.where(held, bound, live_ratio)
    return PolicyTerms(loss, log_ratio.detach(), ratio, clipped_low, clipped_high, clipped_dual)


def policy_loss(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> LossSums:
    """`policy_terms`, summed over the mask.

    Stats: pg_loss; ppo_kl, the k1 estimate of KL(old || new); ratio; pg_clipfrac, both sides of the range, and each as
    ratio_clipped_low and ratio_clipped_high; pg_clipfrac_lower, the dual clip.
    """
    terms = policy_terms(new_logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip)
    stats = _sums(
        mask,
        pg_loss=terms.loss,
        ppo_kl=-terms.log_ratio,
        ratio=terms.ratio,
        pg_clipfrac=terms.clipped_low | terms.clipped_high,
        pg_clipfrac_lower=terms.clipped_dual,
        ratio_clipped_low=terms.clipped_low,
        ratio_clipped_high=terms.clipped_high,
    )
    return LossSums(terms.loss.sum(), mask.sum(), stats)


def value_loss(new_values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> LossSums:
    """Half the squared error to the returns, summed over the mask; all tensors [R].

    With `clip`, PPO's form: the larger of the errors of V and of V held within `clip` of the old value. None: plain.
    Stats: vf_loss, vf_clipfrac, vpred_mean (a sum, as all of them).
    """
    require_flat(mask=mask, new_values=new_values, old_values=old_values, returns=returns)
    error = torch.where(mask, new_values - returns, 0.0)
    held = torch.zeros_like(mask)
    if clip is not None:
        moved = torch.where(mask, new_values - old_values, 0.0).detach()
        bound_error = torch.where(mask, old_values + moved.clamp(-clip, clip) - returns, 0.0)
        held = (moved.abs() > clip) & (bound_error.square() > error.detach().square())
        error = torch.where(held, bound_error, error)
    losses = 0.5 * error.square()
    stats = _sums(mask, vf_loss=losses, vf_clipfrac=held, vpred_mean=new_values)
    return LossSums(losses.sum(), mask.sum(), stats)


def entropy_loss(entropies: Tensor, mask: Tensor) -> LossSums:
    """Minus the entropies [R], in nats: a loss whose weight is the entropy coefficient. Stats: entropy."""
    require_flat(mask=mask, entropies=entropies)
    loss = -torch.where(mask, entropies, 0.0).sum()
    return LossSums(loss, mask.sum(), _sums(mask, entropy=entropies))


def kl_loss(new_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: Literal["k2", "k3"]) -> LossSums:
    """KL to the reference with a gradient, from the estimates of `kl_estimate`; log-probs [R]. Stats: kl_loss."""
    require_flat(mask=mask, new_logprobs=new_logprobs, ref_logprobs=ref_logprobs)
    new_logprobs = torch.where(mask, new_logprobs, 0.0)
    ref_logprobs = torch.where(mask, ref_logprobs, 0.0)
    estimates = kl_estimate(new_logprobs, ref_logprobs, estimator)
    return LossSums(estimates.sum(), mask.sum(), _sums(mask, kl_loss=estimates))


def pairwise_loss(chosen_scores: Tensor, rejected_scores: Tensor, mask: Tensor | None = None) -> LossSums:
    """Bradley-Terry: -log sigmoid(chosen - rejected), summed over pairs; scores [pairs], in pair order.

    mask: bool[pairs], false for pairs that only fill up a micro-batch; None takes all.
    Stats: loss, accuracy (a tie is wrong), margin.
    """
    mask = torch.ones_like(chosen_scores, dtype=torch.bool) if mask is None else mask
    require_flat(mask=mask, chosen_scores=chosen_scores, rejected_scores=rejected_scores)
    margins = torch.where(mask, chosen_scores - rejected_scores, 0.0)
    losses = torch.where(mask, -F.logsigmoid(margins), 0.0)
    return LossSums(losses.sum(), mask.sum(), _sums(mask, loss=losses, accuracy=margins > 0, margin=margins))


def language_model_loss(logprobs: Tensor, mask: Tensor) -> LossSums:
    """Minus the log-probs [N] of the target tokens: SFT, and the ptx term of PPO. Stats: lm_loss."""
    require_flat(mask=mask, logprobs=logprobs)
    losses = -torch.where(mask, logprobs, 0.0)
    return LossSums(losses.sum(), mask.sum(), _sums(mask, lm_loss=losses))

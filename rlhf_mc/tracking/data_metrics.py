"""Metrics that come from the data of an iteration alone, under verl's names. Pure functions on an Experience."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_mc.batch import Experience, RolloutBatch, segment_sum


def rollout_metrics(experience: Experience) -> dict[str, float]:
    """Scores, rewards, advantages, values, KL, lengths and engine mismatch of one whole rollout batch.

    critic/score and critic/rewards are per sequence (rewards summed over its tokens); advantages, returns, values and
    KL are means over all response tokens that count in the loss, never means of means. reward/NAME/mean is the mean
    over the sequences that NAME scored (NaN marks the others). A metric without a single value is left out.
    """
    rollout = experience.rollout
    mask = experience.loss_mask
    result = _spread("critic/score", experience.scores)
    result |= _spread("critic/rewards", segment_sum(experience.rewards, rollout.response_lengths))
    result |= _spread("critic/advantages", experience.advantages[mask])
    result |= _spread("critic/returns", experience.returns[mask])
    result |= _spread("critic/values", experience.values[mask])
    result |= _explained_variance(experience.returns[mask], experience.values[mask])
    for name, part in experience.reward_parts.items():
        result |= _mean(f"reward/{name}/mean", part[~part.isnan()])
    result |= _mean("actor/reward_kl_penalty", (experience.old_logprobs - experience.ref_logprobs)[mask])
    return result | sampling_metrics(rollout, experience.old_logprobs)


def sampling_metrics(rollout: RolloutBatch, old_logprobs: Tensor) -> dict[str, float]:
    """Lengths and engine mismatch of one whole rollout batch, which megatron's actor gives the log-probs [R]."""
    return _length_metrics(rollout) | _mismatch_metrics(rollout.rollout_logprobs, old_logprobs)


def _length_metrics(rollout: RolloutBatch) -> dict[str, float]:
    """clip_ratio is the share of responses that hit max_tokens without finishing."""
    result = _spread("response_length", rollout.response_lengths)
    result |= _mean("response_length/clip_ratio", rollout.truncated)
    return result | _spread("prompt_length", rollout.prompt_lengths)


def _mismatch_metrics(rollout_logprobs: Tensor, old_logprobs: Tensor) -> dict[str, float]:
    """How far the engine's log-probs [R] are from megatron's [R], over every sampled token."""
    logprob_gap = (rollout_logprobs.double() - old_logprobs.double()).abs()
    prob_gap = (rollout_logprobs.double().exp() - old_logprobs.double().exp()).abs()
    result = _mean("training/rollout_logprobs_diff_mean", logprob_gap) | _mean("training/rollout_probs_diff_mean", prob_gap)
    if logprob_gap.numel():
        result["training/rollout_logprobs_diff_max"] = float(logprob_gap.max())
        result["training/rollout_probs_diff_max"] = float(prob_gap.max())
    return result


def _explained_variance(returns: Tensor, values: Tensor) -> dict[str, float]:
    """1 - Var[returns - values] / Var[returns]; left out where the returns do not vary."""
    if returns.numel() < 2 or float(returns.double().var()) == 0.0:
        return {}
    residual = (returns.double() - values.double()).var()
    return {"critic/vf_explained_var": float(1 - residual / returns.double().var())}


def _spread(name: str, values: Tensor) -> dict[str, float]:
    """NAME/mean, NAME/max, NAME/min; nothing for an empty tensor."""
    if not values.numel():
        return {}
    return _mean(f"{name}/mean", values) | {f"{name}/max": float(values.max()), f"{name}/min": float(values.min())}


def _mean(name: str, values: Tensor) -> dict[str, float]:
    return {name: float(values.to(torch.float64).mean())} if values.numel() else {}

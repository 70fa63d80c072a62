"""From rewards to advantages: GAE, whitening, and baselines from a group of samples.

The caller holds the whole rollout batch, so means and variances need no reduction over ranks. Nothing here carries
a gradient. Shapes: legend in `rlhf_mc/batch.py`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlhf_mc.algorithms.contract import require_flat
from rlhf_mc.batch import ragged_arange

WHITENING_EPS = 1e-8
GROUP_STD_EPS = 1e-6


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    response_lengths: Tensor,
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438): advantages [R] and returns [R] = advantages + values.

        delta_t = r_t + gamma V_(t+1) - V_t        A_t = delta_t + gamma lam A_(t+1)

    rewards, values: [R].  response_lengths: int64[B], zeros allowed.
    bootstrap_values: [B], V after the last token: 0 for a response that finished, the critic's value for a truncated
    one that should count as unfinished. None means 0 for all.
    Sequences do not touch: a NaN stays in its own.
    """
    require_flat(response_lengths, rewards=rewards, values=values)
    num_sequences = response_lengths.numel()
    columns = torch.arange(num_sequences, device=values.device)
    num_steps = int(response_lengths.max()) if num_sequences else 0
    cells = (ragged_arange(response_lengths), columns.repeat_interleave(response_lengths))

    # Time by sequence, so that one step of the recursion is one contiguous row. Zero outside a response.
    padded_values = values.new_zeros(num_steps + 1, num_sequences)
    padded_values[cells] = values
    if bootstrap_values is not None:
        padded_values[response_lengths, columns] = bootstrap_values.to(values.dtype)
    deltas = rewards.new_zeros(num_steps, num_sequences)
    deltas[cells] = rewards + gamma * padded_values[1:][cells] - values

    advantages = torch.empty_like(deltas)
    following = deltas.new_zeros(num_sequences)
    for t in reversed(range(num_steps)):
        following = deltas[t] + gamma * lam * following
        advantages[t] = following
    flat = advantages[cells]
    return flat, flat + values


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """x [R] shifted and scaled to mean 0 and unbiased variance 1 over the tokens of mask bool[R]; 0 outside the mask.

    (x - mean) / sqrt(var + 1e-8). Where there is no spread, with all values equal or fewer than two tokens, the
    result is 0. Sums run in float64, so that the order of the tokens does not show in float32.
    """
    require_flat(mask=mask, x=x)
    exact = x.double()
    zero = exact.new_zeros(())
    count = mask.sum()
    mean = torch.where(mask, exact, zero).sum() / count.clamp(min=1)
    centred = torch.where(mask, exact - mean, zero)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return (centred * torch.rsqrt(variance + WHITENING_EPS)).to(x.dtype)


@torch.no_grad()
def group_advantages(scores: Tensor, groups: Tensor, estimator: Literal["grpo", "rloo"]) -> Tensor:
    """One advantage per sequence [B] from the scores [B] of the samples of the same prompt; groups int64[B], any order.

    grpo: (score - group mean) / (group std + 1e-6), unbiased std (arXiv:2402.03300).
    rloo: score - mean of the others' scores (arXiv:2402.14740).
    A group of one has nothing to be compared with: its advantage is 0. A NaN stays in its group.
    """
    require_flat(scores=scores)
    exact = scores.double()  # else equal scores leave rounding in score - mean, which 1 / (0 + 1e-6) blows up
    _, group = groups.unique(return_inverse=True)
    per_group = exact.new_zeros(int(group.max()) + 1 if group.numel() else 0)
    count = per_group.index_add(0, group, torch.ones_like(exact))
    mean = per_group.index_add(0, group, exact) / count
    centred = exact - mean[group]
    others = (count - 1).clamp(min=1)
    if estimator == "grpo":
        std = (per_group.index_add(0, group, centred.square()) / others).sqrt()
        advantages = centred / (std + GROUP_STD_EPS)[group]
    elif estimator == "rloo":
        advantages = centred * (count / others)[group]
    else:
        raise ValueError(f"group estimator '{estimator}' is unknown; choose grpo or rloo")
    return advantages.to(scores.dtype)

"""How far the engine that sampled is from the model that trains, on the sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_mc.algorithms.contract import require_flat


@dataclass(frozen=True)
class RolloutMismatch:
    """Differences of log-probs in nats: largest, mean absolute, and the k1 estimate of KL(engine || trainer)."""

    max_abs: float
    mean_abs: float
    kl: float


@torch.no_grad()
def rollout_mismatch(rollout_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> RolloutMismatch:
    """Compare the engine's log-probs [R] with the trainer's before the update [R], over mask bool[R].

    With no token in the mask there is no mismatch: zeros. A NaN inside the mask shows in all three.
    """
    require_flat(mask=mask, rollout_logprobs=rollout_logprobs, old_logprobs=old_logprobs)
    difference = (rollout_logprobs.double() - old_logprobs.double())[mask]
    if difference.numel() == 0:
        return RolloutMismatch(0.0, 0.0, 0.0)
    size = difference.abs()
    return RolloutMismatch(float(size.max()), float(size.mean()), float(difference.mean()))

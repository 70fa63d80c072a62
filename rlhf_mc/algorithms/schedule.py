"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from rlhf_mc.config import Optim


def lr_at(step: int, total_steps: int, optim: Optim) -> float:
    """Learning rate of update `step` (from 0) in a run of `total_steps` updates.

    Warm-up is linear over `warmup_steps` updates, from lr / warmup_steps to lr: no update is spent at 0.
    Then constant; or linear, or half a cosine, from lr at the first update after warm-up to min_lr at `total_steps`,
    one past the last update. Later steps stay there. ValueError for a negative step.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative; updates are counted from 0")
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    progress = min(1.0, (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps))
    remaining = 1 - progress if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return optim.min_lr + (optim.lr - optim.min_lr) * remaining

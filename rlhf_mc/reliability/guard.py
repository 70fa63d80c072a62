"""The guard of updates: what is not finite, or out of bounds, never reaches the weights. Pure judgements and their counts; no torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mc.batch import Experience
    from rlhf_mc.config import Guard as Bounds

_SHOWN = 8
_OF_TOKENS = ("old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")


class BadUpdateError(RuntimeError):
    """Too many updates in a row were bad. The message says which, and where the last one was seen."""


def fault_of_experience(experience: Experience, bounds: Bounds) -> str | None:
    """What of it must not be trained on: numbers of tokens that count in the loss, and the scores of their sequences. None: nothing.

    Advantages are whitened over all tokens, so one bad number spoils them all.
    """
    mask = experience.loss_mask
    for name in _OF_TOKENS:
        values = getattr(experience, name)
        bad = mask & ~values.isfinite()
        if bad.any():
            samples = _samples_of(bad, experience.rollout.response_lengths)
            return f"{name} of {int(bad.sum())} tokens are not finite, in samples {_listed(samples)}"
    trained = {b for b, part in enumerate(mask.split(experience.rollout.response_lengths.tolist())) if part.any()}
    wild = [b for b, score in enumerate(experience.scores.tolist()) if b in trained and not abs(score) <= bounds.max_score]
    if wild:
        worst = max(wild, key=lambda b: abs(float(experience.scores[b])))
        parts = {name: float(values[worst]) for name, values in experience.reward_parts.items()}
        return f"the score of sample {worst} is {float(experience.scores[worst]):.6g}, beyond guard.max_score {bounds.max_score:g}: {parts}"
    return None


def _samples_of(tokens: Tensor, lengths: Tensor) -> list[int]:
    return [b for b, part in enumerate(tokens.split(lengths.tolist())) if part.any()]


def _listed(samples: list[int]) -> str:
    more = f" and {len(samples) - _SHOWN} more" if len(samples) > _SHOWN else ""
    return ", ".join(map(str, samples[:_SHOWN])) + more


def fault_of_sums(sums: Mapping[str, float], num_tokens: int, bounds: Bounds) -> str | None:
    """What is wrong with what a mini-batch's loss summed over all ranks; None: nothing. A ratio is looked at where there is one."""
    for name, total in sums.items():
        if not math.isfinite(total):
            return f"{name} is {total}"
    ratio = sums.get("ratio", 0.0) / num_tokens
    if ratio > bounds.max_ratio:
        return f"the mean ratio is {ratio:.6g}, beyond guard.max_ratio {bounds.max_ratio:g}"
    return None


def fault_of_norm(grad_norm: float, max_grad_norm: float | None = None) -> str | None:
    """What is wrong with a gradient norm, for which no step was made; None: nothing."""
    if not math.isfinite(grad_norm):
        return f"the gradient norm is {grad_norm}"
    if max_grad_norm is not None and grad_norm > max_grad_norm:
        return f"the gradient norm is {grad_norm:.6g}, beyond guard.max_grad_norm {max_grad_norm:g}"
    return None


class Guard:
    """Counts the updates that were skipped, by what they would have changed; each in a row of its own. Alike on all ranks."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._in_a_row: dict[str, int] = {}
        self._skipped = 0

    def judged(self, what: str, fault: str | None) -> bool:
        """Notes one update of `what`, which a fault has made to be skipped. Whether it was.

        Raises BadUpdateError with the last of guard.max_bad_updates in a row.
        """
        if fault is None:
            self._in_a_row[what] = 0
            return False
        self._skipped += 1
        self._in_a_row[what] = self._in_a_row.get(what, 0) + 1
        if self._in_a_row[what] >= self.bounds.max_bad_updates:
            raise BadUpdateError(
                f"{self._in_a_row[what]} updates of {what} in a row were bad and skipped, as many as guard.max_bad_updates allows; "
                f"the last one: {fault}. The weights are those of the last good update, and so is the newest checkpoint"
            )
        return True

    def metrics(self) -> dict[str, float]:
        """guard/skipped_updates since the last call, and guard/skipped_in_a_row, the longest row that goes on."""
        skipped, self._skipped = self._skipped, 0
        return {"guard/skipped_updates": float(skipped), "guard/skipped_in_a_row": float(max(self._in_a_row.values(), default=0))}

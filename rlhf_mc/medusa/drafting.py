"""Drafting over a run: the schedule of the next rollout, from what all earlier ones measured. The same on every rank; no collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlhf_mc.medusa.draft_length import DraftSchedule, DraftStatistics, Plan, changes, choose, fixed, metrics


class Drafting:
    """How many tokens the engines draft, rollout after rollout."""

    def __init__(self, num_heads: int, drafted_tokens: int | None = None) -> None:
        """drafted_tokens: always so many; None: chosen after each rollout.  num_heads: 0 without heads, which draft nothing."""
        self._chooses = drafted_tokens is None and num_heads > 0
        self._history = DraftStatistics(num_heads)
        self._last: DraftStatistics | None = None
        self._change: float | None = None
        self._first_metrics: dict[str, float] = {}
        self.schedule: DraftSchedule = choose(self._history) if self._chooses else fixed(drafted_tokens or 0)

    def observe(self, replicas: Iterable[Sequence[float]]) -> list[str]:
        """Takes the numbers of the statistics of a rollout's replicas, and chooses anew; a sentence for each change."""
        sums = [sum(numbers) for numbers in zip(*replicas, strict=True)]
        rollout = DraftStatistics.from_numbers(self._history.num_heads, sums)
        self._change = _difference(self._last, rollout)
        self._last, self._history = rollout, self._history.then(rollout)
        if not self._first_metrics and rollout.num_heads and rollout.positions[0].checked:
            self._first_metrics = self.metrics()
        if not self._chooses:
            return []
        before, self.schedule = self.schedule, choose(self._history, self.schedule)
        return changes(before, self.schedule, self._history)

    def metrics(self) -> dict[str, float]:
        """medusa/... of the last rollout; {} without heads, or before the first.

        acceptance_change: of the share of drafts accepted at position 1, against the rollout before: since then the actor was updated.
        """
        if self._last is None or not self._history.num_heads:
            return {}
        found = metrics(self._last, self._history)
        return found if self._change is None else found | {"medusa/acceptance_change": self._change}

    def state(self) -> dict[str, Any]:
        """All that was measured and chosen, as JSON has it."""
        return {
            "history": self._history.numbers(),
            "last": None if self._last is None else self._last.numbers(),
            "change": self._change,
            "first_metrics": self._first_metrics,
            "schedule": asdict(self.schedule),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from the `state` of a run with as many heads and the same setting."""
        last, plans = state["last"], state["schedule"]["plans"]
        self._history = DraftStatistics.from_numbers(self._history.num_heads, state["history"])
        self._last = None if last is None else DraftStatistics.from_numbers(self._history.num_heads, last)
        self._change, self._first_metrics = state["change"], state["first_metrics"]
        plans = tuple(Plan(**(plan | {"untried": tuple(plan["untried"])})) for plan in plans)
        self.schedule = DraftSchedule(plans, state["schedule"]["rollout"])

    def summary(self) -> dict[str, tuple[float | None, float | None]]:
        """What a run ends with: of the first rollout with drafts and the last rollout, by name; {} where there was none."""
        if not self._first_metrics:
            return {}
        shown = {"draft_acceptance": "acceptance/position_1", "tokens_per_forward": "tokens_per_forward", "draft_speedup": "speedup_estimate"}
        first, last = self._first_metrics, self.metrics()
        return {label: (first.get(f"medusa/{name}"), last.get(f"medusa/{name}")) for label, name in shown.items()}


def _difference(before: DraftStatistics | None, after: DraftStatistics) -> float | None:
    """Of the acceptance at position 1; None where either had no draft."""
    if before is None or not after.num_heads or not before.positions[0].reached or not after.positions[0].reached:
        return None
    return after.acceptance[0] - before.acceptance[0]

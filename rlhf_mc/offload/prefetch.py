"""Prefetch: which visit comes next, from a schedule of one iteration that repeats. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_mc.offload.minimum import Visit


class Prefetch:
    """A place in the schedule. Visits that are not in it (an evaluation, a checkpoint) leave the place where it is."""

    def __init__(self, schedule: Sequence[Visit]) -> None:
        self._schedule = schedule
        self._place = -1

    def after(self, present: Visit) -> Visit | None:
        """The visit that follows this one; None where this one is not in the schedule."""
        count = len(self._schedule)
        for step in range(1, count + 1):
            visit = self._schedule[(self._place + step) % count]
            if visit.wanted() == present.wanted():
                self._place = (self._place + step) % count
                return self._schedule[(self._place + 1) % count]
        return None

"""Time hidden: how much work ran beside other work, and the least time that it could have taken. Pure functions on spans.

A resource does one thing at a time: a thread, or a track that runs by itself (a copy lane). Two spans of one resource that
nest or overlap are the same seconds; two spans of different resources at the same time hide one another.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from rlhf_mc.tracking.trace import Span

#: Tracks whose workers can take each other's spans.
POOLED = frozenset({"rewards"})

Interval = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """What the spans of a time window say of work beside work; all in seconds.

    serial: all work, one thing after the other.
    elapsed: when at least one resource worked. Neither waiting nor what no span covers counts.
    hidden: serial - elapsed, the seconds of work that cost no time. Never negative.
    bound: the shortest `elapsed` that any order of the same work could reach, if nothing had to wait for anything else.
    idle: from the first start to the last end, when no resource worked. The window lasts elapsed + idle.
    """

    serial: float
    elapsed: float
    hidden: float
    bound: float
    idle: float

    @property
    def hidden_ratio(self) -> float:
        """Share of the work that cost no time; 0 where there is no work."""
        return self.hidden / self.serial if self.serial else 0.0

    @property
    def hideable_ratio(self) -> float:
        """The share of the work that `bound` would hide; `hidden_ratio` cannot exceed it."""
        return 1 - self.bound / self.serial if self.serial else 0.0

    @property
    def bound_ratio(self) -> float:
        """bound / elapsed: 1 where no order could be faster, and where there is no work."""
        return self.bound / self.elapsed if self.elapsed else 1.0

    def metrics(self) -> dict[str, float]:
        """pipeline/..., in seconds."""
        names = ("serial", "elapsed", "hidden", "bound", "idle")
        return {f"pipeline/{name}_seconds": getattr(self, name) for name in names}


def overlap_of(spans: Iterable[Span]) -> Overlap:
    """Of the spans of one rank, in any order: serial and elapsed time, the time hidden, and the bound.

    A resource's work is what its spans cover, less what its wait/ spans cover. The bound is the largest of: each resource's
    work; for a pool of workers, its longest span and its work divided evenly over the workers seen.
    """
    spans = list(spans)
    if not spans:
        return Overlap(0.0, 0.0, 0.0, 0.0, 0.0)
    work = _work(spans)
    pools = _pools(spans)
    serial = _length(interval for intervals in work.values() for interval in intervals)
    # min: what is equal but for rounding shall be equal.
    elapsed = min(serial, _length(union(interval for intervals in work.values() for interval in intervals)))
    alone = [_length(intervals) for resource, intervals in work.items() if resource not in pools]
    together = [_pool_bound([work[resource] for resource in pools if pools[resource] == track]) for track in set(pools.values())]
    window = max(span.end for span in spans) - min(span.start for span in spans)
    return Overlap(
        serial=serial,
        elapsed=elapsed,
        hidden=serial - elapsed,
        bound=min(elapsed, max(alone + together)),
        idle=max(0.0, window - elapsed),
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same seconds as intervals that do not overlap, in order; those that only touch stay apart, empty ones are dropped."""
    joined: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if joined and start < joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def difference(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """What of `intervals` no one of `others` covers; both as `union` gives them, and so is the result."""
    left: list[Interval] = []
    first = 0
    for start, end in intervals:
        while first < len(others) and others[first][1] <= start:
            first += 1
        place = first
        while place < len(others) and others[place][0] < end:
            left.append((start, others[place][0]))
            start = others[place][1]
            place += 1
        left.append((start, end))
    return [(start, end) for start, end in left if start < end]


def _resource(span: Span) -> Hashable:
    return span.track if span.thread is None else span.thread


def _work(spans: Iterable[Span]) -> dict[Hashable, list[Interval]]:
    """Of each resource, when it worked."""
    busy: defaultdict[Hashable, list[Interval]] = defaultdict(list)
    waits: defaultdict[Hashable, list[Interval]] = defaultdict(list)
    for span in spans:
        (waits if span.is_wait else busy)[_resource(span)].append((span.start, span.end))
    return {resource: difference(union(busy[resource]), union(waits[resource])) for resource in busy.keys() | waits.keys()}


def _pools(spans: Iterable[Span]) -> dict[Hashable, str]:
    """The pool of each resource that does nothing but a pool's spans."""
    tracks: defaultdict[Hashable, set[str]] = defaultdict(set)
    for span in spans:
        tracks[_resource(span)].add(span.track)
    return {resource: next(iter(of)) for resource, of in tracks.items() if len(of) == 1 and of <= POOLED}


def _pool_bound(workers: list[list[Interval]]) -> float:
    """Seconds: no fewer than the longest span takes, nor than all workers need who share the work evenly."""
    longest = max((end - start for intervals in workers for start, end in intervals), default=0.0)
    return max(longest, _length(interval for intervals in workers for interval in intervals) / len(workers))


def _length(intervals: Iterable[Interval]) -> float:
    """Seconds; the same in whatever order they come."""
    return math.fsum(end - start for start, end in intervals)

"""What a copy lane tells the trace: which copy ran when, and who waited for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rlhf_mc.tracking import Trace

#: Whose bytes are copied: role and part.
Labels = Mapping[str, str]


class Job(NamedTuple):
    """One copy as the trace shows it."""

    name: str
    num_bytes: int
    labels: Labels

    @staticmethod
    def of(verb: str, target: Tensor, labels: Labels) -> Job:
        """`verb` (copy, zero) on the bytes of `target`."""
        return Job(" ".join((verb, *labels.values())), target.nbytes, labels)


class LaneTrace:
    """A track of a trace; without a trace, or where it is switched off, nothing is told."""

    def __init__(self, trace: Trace | None, track: str) -> None:
        self._trace = trace if trace is not None and trace.enabled else None
        self.track = track

    @property
    def enabled(self) -> bool:
        """Whether anyone listens."""
        return self._trace is not None

    def ran(self, job: Job, start: float, end: float) -> None:
        """A copy that is done; seconds of time.perf_counter()."""
        if self._trace is not None:
            self._trace.add(job.name, self.track, start, end, bytes=job.num_bytes, **job.labels)

    def waiting(self, job: Job) -> AbstractContextManager[None]:
        """Around what waits on the host for a copy."""
        return nullcontext() if self._trace is None else self._trace.span("wait/copies", **job.labels)


class CudaTime(NamedTuple):
    """An event of CUDA, and when it was, in seconds of time.perf_counter(): so the times of other events are known."""

    event: torch.cuda.Event
    seconds: float

    @staticmethod
    def now(idle: torch.cuda.Stream) -> CudaTime:
        """Waits for `idle`, on which nothing else may be queued: for some microseconds."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(idle)
        event.synchronize()
        return CudaTime(event, time.perf_counter())

    @property
    def stale(self) -> bool:
        """Older than a minute: CUDA gives the time between two events in 32 bits, which then hold 4 microseconds."""
        return time.perf_counter() - self.seconds > 60

    def of(self, event: torch.cuda.Event) -> float:
        """When `event` was, which must have happened; in seconds of time.perf_counter()."""
        return self.seconds + self.event.elapsed_time(event) / 1000

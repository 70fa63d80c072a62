"""Lanes: queues of copies that run beside the computation, one for each direction.

A lane takes copies in order and runs them in order. On a GPU it is a stream; on CPU it is a thread, so that copies in
flight are as real there, and so are the faults of those who do not wait for them. Of the meta device there are no bytes to copy.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from rlhf_mc.offload.lane_trace import CudaTime, Job, Labels, LaneTrace

if TYPE_CHECKING:
    from rlhf_mc.tracking import Trace


class Copied(Protocol):
    """A copy that was queued."""

    def before_compute(self) -> None:
        """What is computed from now on comes after the copy."""

    def finish(self) -> float:
        """Waits until the copy is done; how many seconds it ran."""


class Lane(Protocol):
    """Takes copies between flat byte tensors of equal size. `labels` say whose they are, for the trace."""

    def copy(self, target: Tensor, source: Tensor, labels: Labels) -> Copied:
        """Queues target <- source, after all that was computed until now."""

    def zero(self, target: Tensor, labels: Labels) -> Copied:
        """Queues target <- 0, after all that was computed until now."""


class _HostCopy:
    def __init__(self, job: Job, future: Future[float], trace: LaneTrace) -> None:
        self._job, self._future, self._trace = job, future, trace

    def finish(self) -> float:
        if self._future.done():
            return self._future.result()
        with self._trace.waiting(self._job):
            return self._future.result()

    def before_compute(self) -> None:
        self.finish()


class HostLane:
    """A thread that copies with the C library's memmove, which streams past the caches and holds no Python lock."""

    def __init__(self, trace: LaneTrace) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=trace.track)
        self._trace = trace

    def copy(self, target: Tensor, source: Tensor, labels: Labels) -> Copied:
        """See Lane."""
        return self._queue(Job.of("copy", target, labels), ctypes.memmove, target.data_ptr(), source.data_ptr(), target.nbytes)

    def zero(self, target: Tensor, labels: Labels) -> Copied:
        """See Lane."""
        return self._queue(Job.of("zero", target, labels), ctypes.memset, target.data_ptr(), 0, target.nbytes)

    def _queue(self, job: Job, function, *arguments) -> Copied:
        return _HostCopy(job, self._thread.submit(self._run, job, function, *arguments), self._trace)

    def _run(self, job: Job, function, *arguments) -> float:
        start = time.perf_counter()
        function(*arguments)
        end = time.perf_counter()
        self._trace.ran(job, start, end)
        return end - start


class _StreamCopy:
    def __init__(self, job: Job, lane: StreamLane) -> None:
        self.job, self._lane = job, lane
        self.start, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def finish(self) -> float:
        self._lane.wait_for(self)
        return self.start.elapsed_time(self.end) / 1000

    def before_compute(self) -> None:
        torch.cuda.current_stream().wait_event(self.end)


class StreamLane:
    """A CUDA stream. The trace hears of a copy that is done when the next one is queued, or when the host waits for one."""

    def __init__(self, device: torch.device, trace: LaneTrace) -> None:
        self._stream, self._idle = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._trace = trace
        self._time: CudaTime | None = None
        self._untold: deque[tuple[_StreamCopy, CudaTime]] = deque()

    def copy(self, target: Tensor, source: Tensor, labels: Labels) -> Copied:
        """See Lane."""
        return self._queue(Job.of("copy", target, labels), lambda: target.copy_(source, non_blocking=True))

    def zero(self, target: Tensor, labels: Labels) -> Copied:
        """See Lane."""
        return self._queue(Job.of("zero", target, labels), target.zero_)

    def wait_for(self, copied: _StreamCopy) -> None:
        """Waits on the host until a copy of this lane is done."""
        if not copied.end.query():
            with self._trace.waiting(copied.job):
                copied.end.synchronize()
        self._tell()

    def _queue(self, job: Job, function) -> Copied:
        self._tell()
        time_of = self._fresh_time() if self._trace.enabled else None
        copied = _StreamCopy(job, self)
        # Also orders the copy after kernels that still use memory which the allocator has just handed out again.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copied.start.record()
            function()
            copied.end.record()
        if time_of is not None:
            self._untold.append((copied, time_of))
        return copied

    def _fresh_time(self) -> CudaTime:
        if self._time is None or self._time.stale:
            self._time = CudaTime.now(self._idle)
        return self._time

    def _tell(self) -> None:
        while self._untold and self._untold[0][0].end.query():
            copied, time_of = self._untold.popleft()
            self._trace.ran(copied.job, time_of.of(copied.start), time_of.of(copied.end))


class _NoCopy:
    def finish(self) -> float:
        return 0.0

    def before_compute(self) -> None:
        pass


class MetaLane:
    """Checks that a copy could be made, and makes none."""

    def copy(self, target: Tensor, source: Tensor, labels: Labels) -> Copied:
        """See Lane. Raises ValueError where the sizes differ."""
        if target.nbytes != source.nbytes:
            raise ValueError(f"{' '.join(labels.values())}: {source.nbytes} bytes do not fill {target.nbytes}")
        return _NoCopy()

    def zero(self, target: Tensor, labels: Labels) -> Copied:
        """See Lane."""
        return _NoCopy()


def lanes(device: torch.device, trace: Trace | None = None) -> tuple[Lane, Lane]:
    """(towards the host, towards the device)"""
    out, back = LaneTrace(trace, "copies/out"), LaneTrace(trace, "copies/in")
    if device.type == "cuda":
        return StreamLane(device, out), StreamLane(device, back)
    if device.type == "meta":
        return MetaLane(), MetaLane()
    return HostLane(out), HostLane(back)

"""Lanes: queues of copies that run beside the computation, one for each direction.

A lane takes copies in order and runs them in order. On a GPU it is a stream; on CPU it is a thread, so that copies in
flight are as real there, and so are the faults of those who do not wait for them.
"""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor


class Copied(Protocol):
    """A copy that was queued."""

    def before_compute(self) -> None:
        """What is computed from now on comes after the copy."""

    def finish(self) -> float:
        """Waits until the copy is done; how many seconds it ran."""


class Lane(Protocol):
    """Takes copies between flat byte tensors of equal size."""

    def copy(self, target: Tensor, source: Tensor) -> Copied:
        """Queues target <- source, after all that was computed until now."""

    def zero(self, target: Tensor) -> Copied:
        """Queues target <- 0, after all that was computed until now."""


class _HostCopy:
    def __init__(self, future: Future[float]) -> None:
        self._future = future

    def finish(self) -> float:
        return self._future.result()

    def before_compute(self) -> None:
        self._future.result()


def _timed(function, *arguments) -> float:
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


class HostLane:
    """A thread that copies with the C library's memmove, which streams past the caches and holds no Python lock."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def copy(self, target: Tensor, source: Tensor) -> Copied:
        """See Lane."""
        return self._queue(ctypes.memmove, target.data_ptr(), source.data_ptr(), target.nbytes)

    def zero(self, target: Tensor) -> Copied:
        """See Lane."""
        return self._queue(ctypes.memset, target.data_ptr(), 0, target.nbytes)

    def _queue(self, function, *arguments) -> Copied:
        return _HostCopy(self._thread.submit(_timed, function, *arguments))


class _StreamCopy:
    def __init__(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._start, self._end = start, end

    def finish(self) -> float:
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1000

    def before_compute(self) -> None:
        torch.cuda.current_stream().wait_event(self._end)


class StreamLane:
    """A CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def copy(self, target: Tensor, source: Tensor) -> Copied:
        """See Lane."""
        return self._queue(lambda: target.copy_(source, non_blocking=True))

    def zero(self, target: Tensor) -> Copied:
        """See Lane."""
        return self._queue(target.zero_)

    def _queue(self, function) -> Copied:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Also orders the copy after kernels that still use memory which the allocator has just handed out again.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            start.record()
            function()
            end.record()
        return _StreamCopy(start, end)


def lanes(device: torch.device) -> tuple[Lane, Lane]:
    """(towards the host, towards the device)"""
    if device.type == "cuda":
        return StreamLane(device), StreamLane(device)
    return HostLane("to-host"), HostLane("to-device")

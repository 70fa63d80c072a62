"""Seconds and peak memory by stage. Local to a rank; no collective is issued here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from rlhf_mc.tracking.trace import Trace

GIB = 1024**3
BETWEEN = "between stages"


@dataclass
class _OpenStage:
    name: str
    start: float
    host_peak_bytes: int = 0
    device_peak_bytes: int = 0


@dataclass(frozen=True)
class Waiting:
    """How long a rank has shown no sign of life. stages: those that are open, the innermost last.

    longest: seconds that it ever went without one in that stage.
    """

    stages: tuple[str, ...]
    seconds: float
    longest: float

    @property
    def place(self) -> str:
        """The open stages, as people read them."""
        return " > ".join(self.stages) or BETWEEN


class HostMemory:
    """Resident bytes of this process, and their high-water mark (Linux: /proc/self).

    `can_reset` is false where the system refuses to lower the mark (some containers); then `peak` counts from the start
    of the process.
    """

    def __init__(self) -> None:
        self.can_reset = self.reset_peak()

    def current(self) -> int:
        return self._status_bytes("VmRSS:")

    def peak(self) -> int:
        return self._status_bytes("VmHWM:")

    def reset_peak(self) -> bool:
        """Lowers the mark to what is resident now; about 50 us. False if the system refuses."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    @staticmethod
    def _status_bytes(key: str) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


class StageClock:
    """Accumulates seconds and peak memory per stage of one iteration.

    Stages nest under explicit names: `with clock.stage("score"):` around `with clock.stage("score/actor"):`. A name may
    come several times in an iteration; its seconds add up, its peak is the largest. Threads may share a clock.
    failed_in: the innermost stage that an error came through first.
    On CUDA, both ends of a stage wait for the calling thread's current stream, so that a stage is charged for its own
    kernels; copies on other streams keep running.
    """

    def __init__(self, device: torch.device = torch.device("cpu"), trace: Trace | None = None) -> None:
        """trace: gets each stage as a span on its track main, and its iterations from here."""
        self._cuda = device if device.type == "cuda" else None
        self._trace = Trace(num_iterations=0) if trace is None else trace
        self._lock = threading.Lock()
        self._host = HostMemory()
        self._open: list[_OpenStage] = []
        self._run_peak = 0
        self._last_sign = time.perf_counter()
        self._longest: dict[str, float] = {}
        self.failed_in = BETWEEN
        self._begin_iteration()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times the block and notes its peak memory, also when the block raises."""
        self._wait_for_kernels()
        with self._trace.span(name):
            stage = self._enter(name)
            try:
                yield
            except Exception:
                if self.failed_in == BETWEEN:
                    self.failed_in = name
                raise
            finally:
                self._wait_for_kernels()
                self._leave(stage)

    def progress(self) -> None:
        """A sign of life inside a stage that has many steps; its begin and its end are signs by themselves."""
        with self._lock:
            self._sign()

    def waiting(self) -> Waiting:
        """How long there was no sign of life, and where. From any thread."""
        with self._lock:
            names = tuple(stage.name for stage in self._open)
            seconds = time.perf_counter() - self._last_sign
            return Waiting(names, seconds, self._longest.get(names[-1] if names else BETWEEN, 0.0))

    def metrics(self, total_num_tokens: int | None = None, num_devices: int = 1) -> dict[str, float]:
        """What this rank spent since the last call (or since the clock was made); then starts the next iteration.

        timing_s/STAGE, timing_s/step and perf/time_per_step in seconds; memory_gib/STAGE/host and /device are peaks;
        perf/host_rss_gib and perf/host_rss_peak_gib are this process, perf/cpu_memory_used_gb the whole machine.
        With `total_num_tokens` (prompts and responses of all ranks): perf/throughput in tokens a second and device.
        """
        with self._lock:
            self._fold_peaks()
            seconds = time.perf_counter() - self._iteration_start
            result = {f"timing_s/{name}": spent for name, spent in self._seconds.items()}
            result |= {"timing_s/step": seconds, "perf/time_per_step": seconds}
            result |= self._memory_metrics()
            self._begin_iteration()
        if total_num_tokens is not None:
            result["perf/total_num_tokens"] = total_num_tokens
            result["perf/throughput"] = total_num_tokens / (seconds * num_devices)
        return result

    @property
    def host_peak_gib(self) -> float:
        """Most memory that this process held since the clock was made."""
        with self._lock:
            self._fold_peaks()
            return self._run_peak / GIB

    def _begin_iteration(self) -> None:
        self._trace.begin_iteration()
        self._iteration_start = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._host_peaks: dict[str, int] = {}
        self._device_peaks: dict[str, int] = {}
        self._host_peak = self._host.current()
        self._device_peak = 0

    def _sign(self) -> None:
        now, name = time.perf_counter(), self._open[-1].name if self._open else BETWEEN
        self._longest[name] = max(self._longest.get(name, 0.0), now - self._last_sign)
        self._last_sign = now

    def _enter(self, name: str) -> _OpenStage:
        with self._lock:
            self._sign()
            self._fold_peaks()
            stage = _OpenStage(name, time.perf_counter())
            self._open.append(stage)
            return stage

    def _leave(self, stage: _OpenStage) -> None:
        with self._lock:
            self._sign()
            self._fold_peaks()
            self._open.remove(stage)
            name = stage.name
            self._seconds[name] = self._seconds.get(name, 0.0) + (time.perf_counter() - stage.start)
            self._host_peaks[name] = max(self._host_peaks.get(name, 0), stage.host_peak_bytes)
            self._device_peaks[name] = max(self._device_peaks.get(name, 0), stage.device_peak_bytes)

    def _wait_for_kernels(self) -> None:
        if self._cuda is not None:
            torch.cuda.current_stream(self._cuda).synchronize()

    def _fold_peaks(self) -> None:
        """Credits the peak since the last call to every open stage, then starts a new peak: an outer stage must keep a
        peak that came before an inner stage, and an inner stage must not see it."""
        host = self._host.peak()
        self._host.reset_peak()
        device = 0
        if self._cuda is not None:
            device = torch.cuda.max_memory_allocated(self._cuda)
            torch.cuda.reset_peak_memory_stats(self._cuda)
        for stage in self._open:
            stage.host_peak_bytes = max(stage.host_peak_bytes, host)
            stage.device_peak_bytes = max(stage.device_peak_bytes, device)
        self._host_peak = max(self._host_peak, host)
        self._run_peak = max(self._run_peak, host)
        self._device_peak = max(self._device_peak, device)

    def _memory_metrics(self) -> dict[str, float]:
        result = {
            "perf/host_rss_gib": self._host.current() / GIB,
            "perf/host_rss_peak_gib": self._host_peak / GIB,
            "perf/cpu_memory_used_gb": psutil.virtual_memory().used / GIB,
        }
        if self._host.can_reset:
            result |= {f"memory_gib/{name}/host": peak / GIB for name, peak in self._host_peaks.items()}
        if self._cuda is not None:
            result["perf/max_memory_allocated_gb"] = self._device_peak / GIB
            result["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(self._cuda) / GIB
            result |= {f"memory_gib/{name}/device": peak / GIB for name, peak in self._device_peaks.items()}
        return result

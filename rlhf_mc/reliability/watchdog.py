"""The watchdog: a thread of each rank that ends the job where the rank shows no sign of life for too long, and says where it stands.

A rank waits where others wait, so that the watchdogs of all ranks go off together; those of one host make each other write down
their stacks at once. Signs of life are the ends of stages and of steps in them (tracking/clock.py).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rlhf_mc.reliability.siblings import siblings
from rlhf_mc.reliability.statuses import HUNG

if TYPE_CHECKING:
    from rlhf_mc.config import Watchdog as Limits
    from rlhf_mc.tracking.clock import Waiting

_LOOKS_EVERY_SECONDS = 1.0
_SECONDS_FOR_OTHERS = 3.0


class Watchdog:
    """Watches while its `with` block runs.

    look: how long there was no sign of life, and where.  last: what this rank finished last, for people to read.
    waits_between: whether this rank waits between stages for as long as others work, as one that only runs an engine does.
    stacks: where the stacks of all threads go; SIGUSR2 puts them there at any time.  beat: called at each look.
    """

    def __init__(
        self,
        limits: Limits,
        rank: int,
        look: Callable[[], Waiting],
        last: Callable[[], str],
        stacks: Path,
        beat: Callable[[], None] = lambda: None,
        waits_between: bool = False,
    ) -> None:
        self._waits_between = waits_between
        self._limits, self._rank, self._look, self._last, self._stacks, self._beat = limits, rank, look, last, stacks, beat
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._stacks.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._stacks, "w")  # noqa: SIM115 - a signal writes to it
        faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=True)
        self._siblings = siblings()
        if self._limits.seconds is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # one that comes late must not end this process
        self._file.close()
        if not self._stacks.stat().st_size:
            self._stacks.unlink()
            with suppress(OSError):
                self._stacks.parent.rmdir()

    def limit_of(self, waiting: Waiting) -> float:
        """Seconds without a sign of life that are too many there."""
        return max(self._limits.seconds, self._limits.factor * waiting.longest)

    def _watch(self) -> None:
        while not self._ended.wait(_LOOKS_EVERY_SECONDS):
            self._beat()
            waiting = self._look()
            if waiting.seconds > self.limit_of(waiting) and (waiting.stages or not self._waits_between):
                self._end_job(waiting)

    def _end_job(self, waiting: Waiting) -> None:
        for pid in (*self._siblings, os.getpid()):
            with suppress(OSError):
                os.kill(pid, signal.SIGUSR2)
        print(
            f"rlhf_mc: watchdog: rank {self._rank} shows no sign of life for {waiting.seconds:.0f} s, more than the "
            f"{self.limit_of(waiting):.0f} s of watchdog.seconds and factor: {waiting.place}; the last that it finished: {self._last()}; "
            f"where its threads stand: {self._stacks} (and beside it those of the other ranks); ending the job",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(_SECONDS_FOR_OTHERS)
        os._exit(HUNG)

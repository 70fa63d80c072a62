"""The request to stop: SIGTERM, the signal that sbatch sends ahead (SIGUSR1), or Ctrl-C. It is noted; the run obeys at a safe point.

torchrun sends SIGTERM for another reason too: to end the ranks that are left when one has failed. A rank that waits for the dead
one would never come to a safe point, so a thread looks whether all ranks of this host are there, and ends this one if not.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

from rlhf_mc.reliability.siblings import is_alive, siblings
from rlhf_mc.reliability.statuses import FELLED, STOPPED

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_LOOKS_EVERY_SECONDS = 0.2
_SECONDS_TO_CLOSE = 10.0


class StopAsked(Exception):
    """Raised at a safe point, on all ranks alike, where one of them was asked to stop."""


class Stopped(Exception):
    """What was to be saved is saved, and this rank leaves with status STOPPED."""


class StopRequest:
    """Whether this process was asked to stop.

    is_over: whether the run has said that it is over, from any thread; a rank that only runs an engine then leaves at once.
    """

    def __init__(self, is_over: Callable[[], bool] = lambda: False) -> None:
        self._signal: signal.Signals | None = None
        self._is_over = is_over
        self._leaves_with: int | None = None

    @property
    def asked(self) -> bool:
        """Whether a signal came."""
        return self._signal is not None

    @property
    def name(self) -> str:
        """The signal's name; empty where none came."""
        return self._signal.name if self._signal is not None else ""

    @staticmethod
    def that_listens(is_over: Callable[[], bool] = lambda: False) -> StopRequest:
        """From now on signals do not end this process, but are noted. Call it in the main thread, when all ranks have started."""
        request = StopRequest(is_over)
        request._listen()
        return request

    def _listen(self) -> None:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in ASKING:
            signal.signal(number, self._note)
        # The interpreter writes the number here at once, though the main thread may be waiting in a collective.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=[reader, siblings()], name="signals", daemon=True).start()

    def leaves_with(self, status: int) -> None:
        """All is saved: that another rank is gone means from now on that it was faster. This one gets some seconds to close its files."""
        self._leaves_with = status

    def _note(self, number: int, frame: object) -> None:
        self._signal = self._signal or signal.Signals(number)

    def _watch(self, reader: int, others: Sequence[int]) -> None:
        while not self.asked:
            number = os.read(reader, 1)[0]
            if number in ASKING:
                self._note(number, None)
        while all(map(is_alive, others)):
            if self._is_over():
                os._exit(STOPPED)
            time.sleep(_LOOKS_EVERY_SECONDS)
        if self._leaves_with is not None:
            time.sleep(_SECONDS_TO_CLOSE)
            os._exit(self._leaves_with)
        os._exit(STOPPED if self._is_over() else FELLED)

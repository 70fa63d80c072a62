"""Processor seconds of each part of the control plane, on one rank: what a loaded machine adds by waiting does not count."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """seconds: by part, in the order in which the parts were first met."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside counts for this part."""
        start = time.process_time()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start

    @property
    def total(self) -> float:
        """Of all parts."""
        return sum(self.seconds.values())

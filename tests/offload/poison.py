"""Makes faults of offload visible: freed memory that is handed out again holds garbage, and copies take their time."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhf_mc.offload.arena import Arena
from rlhf_mc.offload.lane_trace import Job
from rlhf_mc.offload.lanes import Copied, HostLane


@contextmanager
def poisoned(copy_seconds: float = 0.0) -> Iterator[None]:
    """Inside, memory holds garbage from the moment it is freed and when it comes back, and each copy starts late.

    Without this, the allocator may return the very bytes that were freed, and a reload that does nothing would pass.
    """
    release, restore, queue = Arena.release, Arena.restore, HostLane._queue

    def poison(arena: Arena) -> None:
        if arena.num_bytes:
            ctypes.memset(arena.bytes().data_ptr(), 0xA5, arena.num_bytes)

    def poison_and_release(arena: Arena) -> None:
        poison(arena)
        release(arena)

    def restore_and_poison(arena: Arena) -> None:
        restore(arena)
        poison(arena)

    def queue_late(lane: HostLane, job: Job, function: Any, *arguments: Any) -> Copied:
        def late(*arguments: Any) -> None:
            time.sleep(copy_seconds)
            function(*arguments)

        return queue(lane, job, late, *arguments)

    Arena.release, Arena.restore, HostLane._queue = poison_and_release, restore_and_poison, queue_late
    try:
        yield
    finally:
        Arena.release, Arena.restore, HostLane._queue = release, restore, queue

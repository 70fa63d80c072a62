"""The other ranks of this host: those that the same torchrun started (Linux: /proc)."""

from __future__ import annotations

import os
from pathlib import Path


def siblings() -> list[int]:
    """Their process ids; none without torchrun, or where there is no /proc."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or not Path("/proc/self").exists():
        return []
    parent = os.getppid()
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in found if pid != os.getpid() and _parent(pid) == parent and _is_rank(pid)]


def is_alive(pid: int) -> bool:
    """False also for a process that has ended and was not yet waited for."""
    return _status(pid)[:1] not in ([], ["Z"], ["X"])


def _status(pid: int) -> list[str]:
    """State, parent, ... of a process; empty where there is none."""
    try:
        # The name of the program, in parentheses before these, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _parent(pid: int) -> int:
    return int((_status(pid) + ["", "0"])[1] or 0)


def _is_rank(pid: int) -> bool:
    try:
        return b"\0LOCAL_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False

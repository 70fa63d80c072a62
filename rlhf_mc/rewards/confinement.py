"""What a reward worker may not do: take more memory than allowed, or reach the network. Linux; called by the worker on itself."""

from __future__ import annotations

import ctypes
import os
import resource
from dataclasses import dataclass

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


@dataclass(frozen=True)
class Confinement:
    """memory_bytes: of the worker's address space, libraries included; None: no limit.  network: whether it may use it."""

    memory_bytes: int | None = None
    network: bool = True

    def enter(self) -> None:
        """For this process, which has one thread yet, and for all that it starts. Raises OSError where the host does not allow it."""
        if not self.network:
            _leave_network()
        if self.memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (self.memory_bytes, self.memory_bytes))


def _leave_network() -> None:
    """Into a network namespace that has not even a loopback that is up: as root at once, else as root of a user namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(
            number,
            f"reward.network=false, but this host lets no process leave the network ({os.strerror(number)}); "
            "allow user namespaces there, or set reward.network=true",
        )

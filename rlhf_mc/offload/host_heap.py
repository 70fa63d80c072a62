"""The C library's heap on CPU ranks: freed memory stays mapped, as freed memory of a GPU stays in torch's caching allocator."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Makes malloc take large blocks from the heap and keep them there when freed; whether the C library took it.

    By default every block of some megabytes is mapped anew and unmapped when freed, so each reload would first fault in
    and zero its pages, which costs more than the copy. Freed memory is still free: any later allocation of this process
    (the engine's too) is served from it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))

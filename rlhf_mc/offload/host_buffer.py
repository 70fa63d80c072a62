"""HostBuffer: memory of the host for one part of one role, of exact size, allocated once, page-locked for a GPU."""

from __future__ import annotations

import mmap
import warnings
import weakref

import torch
from torch import Tensor

from rlhf_mc.offload.numa import bind_to_node, node_of_device
from rlhf_mc.offload.text import readable


class HostBuffer:
    """`num_bytes` of host memory at an address that never changes.

    For a GPU the pages are locked in place (cudaHostRegister), which keeps the exact size; torch's pinned allocator would
    round up to a power of two. Where locking fails, copies go through pageable memory, and a warning states the price.
    For the meta device there is no memory: the buffer has its size only.
    """

    def __init__(self, num_bytes: int, device: torch.device, owner: str) -> None:
        self.num_bytes = num_bytes
        self.locked = False
        if device.type == "meta":
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            return
        # Private, because the kernel gives huge pages to private memory only; with small ones a copy is half as fast on CPU.
        self._map = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:num_bytes]
        if device.type == "cuda" and num_bytes:
            bind_to_node(self.address, num_bytes, node_of_device(device))
            self._lock(owner)

    @property
    def address(self) -> int:
        """Where it starts."""
        return self.bytes.data_ptr()

    def _lock(self, owner: str) -> None:
        error = torch.cuda.cudart().cudaHostRegister(self.address, self.num_bytes, 0)
        self.locked = int(error) == 0
        if self.locked:
            weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, self.address)
        else:
            warnings.warn(
                f"{owner}: {readable(self.num_bytes)} of host memory could not be page-locked (CUDA error {int(error)}). "
                "Copies will go through pageable memory, several times slower than the link, and will not overlap with compute. "
                "Raise the limit of locked memory (ulimit -l unlimited)",
                stacklevel=2,
            )

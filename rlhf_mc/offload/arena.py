"""Arena: one device storage with everything that views it. Its memory can be freed and brought back under the same views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rlhf_mc.offload.layout import ALIGNMENT, pack_numels


class Arena:
    """The whole storage behind some tensors.

    Freeing resizes the storage to zero bytes; tensors that view it stay as they are (touching their values meanwhile is
    a crash, not an error), and see the new memory once it is back. So nothing that holds a view needs to be told.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self.num_bytes = self._storage.nbytes()
        self.device = tensor.device

    @property
    def present(self) -> bool:
        """Whether the memory is there."""
        return self._storage.nbytes() > 0

    @property
    def key(self) -> int:
        """Identity of the storage; the same for every view."""
        return self._storage._cdata

    def release(self) -> None:
        """Frees the memory. No copy from or to it may be in flight.

        Raises RuntimeError where somebody else depends on the memory.
        """
        if not self._storage.resizable():
            raise RuntimeError(
                "a storage of the model cannot be freed, because a NumPy view of it was taken (Tensor.numpy()) "
                "or it is shared with another process; copy the tensor before handing it out"
            )
        self._storage.resize_(0)

    def restore(self) -> None:
        """Allocates the memory again; its contents are undefined."""
        self._storage.resize_(self.num_bytes)

    def bytes(self) -> Tensor:
        """uint8[num_bytes] over the present memory. Drop it before the memory is freed."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self._storage, 0, (self.num_bytes,))


def storage_key(tensor: Tensor) -> int:
    """Identity of the storage that a tensor views."""
    return tensor.untyped_storage()._cdata


def adopt(buffers: Iterable[Tensor]) -> list[Arena]:
    """Arenas over buffers that are flat already; each must be the whole of its storage."""
    arenas = []
    for buffer in buffers:
        arena = Arena(buffer)
        if arena.num_bytes != buffer.nbytes:
            raise RuntimeError(f"a buffer of {buffer.nbytes} bytes lies in a storage of {arena.num_bytes} bytes; it must fill it")
        arenas.append(arena)
    return arenas


def pack(tensors: Sequence[Tensor], chunk_bytes: int, alignment: int = ALIGNMENT, multiple: int = 1) -> list[Arena]:
    """Moves the tensors, which must own their memory, into as few storages as possible; each becomes a view of its place.

    The tensor objects stay the same, so lists and dicts that hold them stay right. Peak: one chunk beside the tensors.
    Precisions are kept apart, in the order of their first tensors; the rest is as `layout.pack_numels` says.
    """
    arenas = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        for chunk in pack_numels([t.numel() for t in same], dtype.itemsize, chunk_bytes, alignment, multiple):
            flat = torch.zeros(chunk.numel, dtype=dtype, device=same[0].device)
            for tensor, start in zip(same[chunk.first :], chunk.offsets):
                view = flat[start : start + tensor.numel()].view(tensor.shape)
                view.copy_(tensor.detach())
                tensor.data = view
            arenas.append(Arena(flat))
    return arenas

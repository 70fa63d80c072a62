"""Where tensors lie in flat storages: offsets, paddings, and cutting into chunks. Pure; no torch.

`arena.py` builds by it, and `sizes.py` predicts by it, so that the two agree to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Every tensor starts at a multiple of so many elements (megatron's own rule for its buckets), which fast kernels ask for.
ALIGNMENT = 64
#: Largest storage into which tensors are packed; a larger tensor gets a storage of its own. One chunk is what a swap holds twice.
CHUNK_BYTES = 256 << 20


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class Chunk:
    """One storage: tensors `first` .. `first + len(offsets)` of a list, at `offsets`; `numel` elements in all."""

    first: int
    offsets: tuple[int, ...]
    numel: int


def pack_numels(
    numels: Sequence[int], element_bytes: int, chunk_bytes: int = CHUNK_BYTES, alignment: int = ALIGNMENT, multiple: int = 1
) -> list[Chunk]:
    """Cuts tensors of these sizes, in order, into chunks of at most about `chunk_bytes`; a tensor is never split.

    Each tensor starts at a multiple of `alignment` elements. Each chunk can be cut evenly into `multiple` shares.
    """
    chunks: list[Chunk] = []
    first, end = 0, 0
    offsets: list[int] = []

    def close() -> None:
        chunks.append(Chunk(first, tuple(offsets), round_up(end, alignment * multiple)))

    for index, numel in enumerate(numels):
        place = round_up(numel, alignment)
        if offsets and (end + place) * element_bytes > chunk_bytes:
            close()
            first, end, offsets = index, 0, []
        offsets.append(end)
        end += place
    if offsets:
        close()
    return chunks


def packed_bytes(
    numels: Sequence[int], element_bytes: int, chunk_bytes: int = CHUNK_BYTES, alignment: int = ALIGNMENT, multiple: int = 1
) -> int:
    """Bytes of all chunks of `pack_numels`."""
    return element_bytes * sum(chunk.numel for chunk in pack_numels(numels, element_bytes, chunk_bytes, alignment, multiple))

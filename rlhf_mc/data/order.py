"""Which rows a batch takes: a pure function of (seed, epoch, index), with no state to save."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy
import torch
from torch import Tensor


@dataclass(frozen=True)
class Order:
    """An endless sequence of row numbers in which every epoch holds each row exactly once.

    Epochs follow each other without a gap, so a batch may span two of them. Without `shuffle` each epoch is in file order.
    """

    num_rows: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError(f"an order needs rows, got num_rows={self.num_rows}")

    def positions(self, index: int, size: int) -> Tensor:
        """Places of batch `index` in the endless sequence, int64[size]."""
        return torch.arange(index * size, (index + 1) * size)

    def rows(self, positions: Tensor) -> Tensor:
        """Row numbers at these places, int64 like `positions`."""
        epochs = positions // self.num_rows
        rows = torch.empty_like(positions)
        for epoch in epochs.unique().tolist():
            here = epochs == epoch
            rows[here] = self.epoch(epoch)[positions[here] % self.num_rows]
        return rows

    def epoch(self, epoch: int) -> Tensor:
        """All row numbers in the order of this epoch, int64[num_rows]."""
        if not self.shuffle:
            return torch.arange(self.num_rows)
        return _permutation(self.num_rows, self.seed, epoch)

    def num_batches(self, size: int, epochs: int) -> int:
        """Batches of `size` until every row was seen `epochs` times; the last one may reach into the next epoch."""
        return -(-self.num_rows * epochs // size)


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> Tensor:
    """Sorting raw Philox words, not numpy's own shuffle: only the raw stream is promised to stay the same in later versions."""
    key = numpy.array([seed % 2**64, epoch], dtype=numpy.uint64)
    words = numpy.random.Philox(key=key).random_raw(num_rows)
    return torch.from_numpy(numpy.argsort(words, kind="stable"))

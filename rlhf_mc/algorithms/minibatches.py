"""Which sequences of a rollout share an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import torch
from torch import Tensor


def mini_batch_indices(seed: int, iteration: int, epoch: int, num_sequences: int, num_minibatches: int) -> Iterator[Tensor]:
    """int64 indices of each mini-batch of one epoch, ascending: a permutation that depends on (seed, iteration, epoch) only, cut evenly."""
    of_epoch = numpy.random.SeedSequence((seed, iteration, epoch)).generate_state(1)
    order = torch.randperm(num_sequences, generator=torch.Generator().manual_seed(int(of_epoch[0])))
    for indices in order.chunk(num_minibatches):
        yield indices.sort().values

"""What carries a weight sync between ranks: messages that start together and are waited for later, and sums over all ranks.

`GroupWire` is a group that torch.distributed knows. `GlooWire` is one that it does not know, since it joins two worlds. The
same over NCCL is in pipeline/nccl_wire.py: vLLM brings what it is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Message:
    """A contiguous tensor and the rank of the wire that it goes to, or comes from."""

    tensor: Tensor
    peer: int


class Pending(Protocol):
    """Messages on their way."""

    def wait(self) -> object:
        """Until they are there, for what this rank does next with their tensors."""


class Wire(Protocol):
    """The ranks of a sync. name: which they are, for error messages.  rank: this one among them."""

    name: str
    rank: int

    def start(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[Pending]:
        """Sets messages going, in the same order on both ends of each pair of ranks. Tensors must stay as they are meanwhile."""

    def sum(self, values: Tensor) -> None:
        """Collective over the wire: `values` (int64) becomes its sum over all ranks."""


class GroupWire:
    """A process group of torch.distributed (gloo or NCCL)."""

    def __init__(self, group: dist.ProcessGroup, name: str = "the model group") -> None:
        self.name, self.rank, self._group = name, group.rank(), group

    def start(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[Pending]:
        """One batch."""
        operations = [dist.P2POp(dist.irecv, m.tensor, group=self._group, group_peer=m.peer) for m in receives]
        operations += [dist.P2POp(dist.isend, m.tensor, group=self._group, group_peer=m.peer) for m in sends]
        return dist.batch_isend_irecv(operations) if operations else []

    def sum(self, values: Tensor) -> None:
        """Collective over the group."""
        dist.all_reduce(values, group=self._group)


class GlooWire:
    """A gloo group outside of torch.distributed's world."""

    def __init__(self, group: dist.ProcessGroupGloo, name: str = "the job") -> None:
        self.name, self.rank, self._group = name, group.rank(), group

    def start(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[Pending]:
        """Messages on the host."""
        return [self._group.recv([m.tensor], m.peer, 0) for m in receives] + [self._group.send([m.tensor], m.peer, 0) for m in sends]

    def sum(self, values: Tensor) -> None:
        """Collective over the group."""
        self._group.allreduce([values]).wait()

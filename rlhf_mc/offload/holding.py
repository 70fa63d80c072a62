"""Holding: one part of one role, and what is known of it: on the device, in flight, or changed since its last copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from rlhf_mc.models.role import Role
from rlhf_mc.offload.arena import Arena
from rlhf_mc.offload.host_buffer import HostBuffer
from rlhf_mc.offload.lane_trace import Labels
from rlhf_mc.offload.lanes import Copied
from rlhf_mc.offload.model_state import ModelState
from rlhf_mc.offload.parts import Part


class Piece(NamedTuple):
    """One storage, and the memory of the host that is its copy, or a copy of this rank's share of it (None for gradients)."""

    arena: Arena
    host: Tensor | None

    def share(self, group: dist.ProcessGroup | None) -> Tensor:
        """The bytes on the device that this rank copies."""
        whole = self.arena.bytes()
        return whole if group is None else whole.chunk(group.size())[group.rank()]


@dataclass(eq=False)  # one holding is never another, whatever they hold
class Holding:
    """resident: on the device, or on its way there.  host: its copy; none for gradients.

    shared_by: ranks that hold the same and each keep a share of the host copy; None where this rank keeps all of it.
    copied_version: the model's version that the host copy holds; None before the first copy.
    in_flight: copies to the device that were queued and not yet waited for.  to_gather: storages of which this rank's share is
    there or coming, and the rest is still with the others.
    """

    state: ModelState
    part: Part
    host: HostBuffer | None
    shared_by: dist.ProcessGroup | None = None
    resident: bool = True
    copied_version: int | None = None
    in_flight: list[Copied] = field(default_factory=list)
    to_gather: list[Piece] = field(default_factory=list)

    @staticmethod
    def of(state: ModelState, part: Part, with_host: bool, shared_by: dist.ProcessGroup | None) -> Holding:
        """A part that is on the device. `with_host`: it will leave at times, so it gets its host memory now."""
        shared_by = shared_by if part is Part.PARAMS else None
        holding = Holding(state, part, None, shared_by)
        if with_host and part is not Part.GRADS:
            holding.host = HostBuffer(holding.copied_bytes, state.model.world.device, holding.name)
        return holding

    @property
    def role(self) -> Role:
        """Whose part it is."""
        return self.state.role

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.role.value} {self.part.label}"

    @property
    def labels(self) -> Labels:
        """For the trace."""
        return {"role": self.role.value, "part": self.part.label}

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """Its storages on the device."""
        return self.state.arenas[self.part]

    @property
    def num_bytes(self) -> int:
        """Bytes of all its storages."""
        return self.state.num_bytes(self.part)

    @property
    def copied_bytes(self) -> int:
        """Bytes of what this rank copies when all of it moves."""
        return self.num_bytes // (self.shared_by.size() if self.shared_by else 1)

    @property
    def needs_copy(self) -> bool:
        """Whether the device knows something that the host does not."""
        return self.part is not Part.GRADS and self.copied_version != self.state.model.version

    @property
    def place(self) -> str:
        """For tables."""
        if self.resident:
            return "coming to the device" if self.in_flight else "device" + (", changed" if self.needs_copy else "")
        return "freed" if self.part is Part.GRADS else "host"

    def pieces(self) -> Iterator[Piece]:
        """Each storage with its place in host memory."""
        start = 0
        for arena in self.arenas:
            length = arena.num_bytes // (self.shared_by.size() if self.shared_by else 1)
            yield Piece(arena, None if self.host is None else self.host.bytes[start : start + length])
            start += length

    def before_compute(self) -> None:
        """What is computed from now on comes after the copies in flight. Collective over `shared_by` where there is such."""
        for copied in self.in_flight:
            copied.before_compute()
        self.in_flight.clear()
        for piece in self.to_gather:
            dist.all_gather_into_tensor(piece.arena.bytes(), piece.share(self.shared_by), group=self.shared_by)
        self.to_gather.clear()

    def finish(self) -> None:
        """Waits on the host until nothing is in flight; what was to be gathered will not be."""
        for copied in self.in_flight:
            copied.finish()
        self.in_flight.clear()
        self.to_gather.clear()

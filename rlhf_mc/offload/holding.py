"""Holding: one part of one role, and what is known of it: whether it is on the device, in flight, or changed since its last copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from rlhf_mc.models.role import Role
from rlhf_mc.offload.arena import Arena
from rlhf_mc.offload.host_buffer import HostBuffer
from rlhf_mc.offload.lanes import Copied
from rlhf_mc.offload.model_state import ModelState
from rlhf_mc.offload.parts import Part


@dataclass
class Holding:
    """resident: on the device, or on its way there.  host: its copy; none for gradients.

    copied_version: the model's version that the host copy holds; None before the first copy.
    in_flight: copies to the device that were queued and not yet waited for.
    """

    state: ModelState
    part: Part
    host: HostBuffer | None
    resident: bool = True
    copied_version: int | None = None
    in_flight: list[Copied] = field(default_factory=list)

    @staticmethod
    def of(state: ModelState, part: Part, with_host: bool) -> Holding:
        """A part that is on the device. `with_host`: it will leave at times, so it gets its host memory now."""
        if not with_host or part is Part.GRADS:
            return Holding(state, part, None)
        owner = f"{state.role.value} {part.label}"
        return Holding(state, part, HostBuffer(state.num_bytes(part), state.model.world.device, owner))

    @property
    def role(self) -> Role:
        """Whose part it is."""
        return self.state.role

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.role.value} {self.part.label}"

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """Its storages on the device."""
        return self.state.arenas[self.part]

    @property
    def num_bytes(self) -> int:
        """Bytes of all its storages."""
        return self.state.num_bytes(self.part)

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

    def pieces(self) -> Iterator[tuple[Arena, Tensor | None]]:
        """Each storage with its place in host memory (None for gradients)."""
        start = 0
        for arena in self.arenas:
            yield arena, None if self.host is None else self.host.bytes[start : start + arena.num_bytes]
            start += arena.num_bytes

    def before_compute(self) -> None:
        """What is computed from now on comes after the copies in flight."""
        for copied in self.in_flight:
            copied.before_compute()
        self.in_flight.clear()

    def finish(self) -> None:
        """Waits on the host until nothing is in flight."""
        for copied in self.in_flight:
            copied.finish()
        self.in_flight.clear()

"""The fewest bytes that must move, from sizes and from what stages ask for. Pure; no torch.

The rules, for one role on the device at a time, with whole host copies:
- what a visit asks for and the visit before it left there is not loaded;
- gradients are never moved: they are zero when an update starts;
- what leaves goes to the host only if an update changed it since its last copy; a frozen role never does.
Loading less would need a device that keeps a second role; storing less would lose an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from rlhf_mc.offload.parts import Part

if TYPE_CHECKING:
    from rlhf_mc.models.role import Role

Direction = Literal["to_host", "to_device"]


class Route(NamedTuple):
    """What moves, and which way."""

    role: Role
    part: Part
    direction: Direction


class Visit(NamedTuple):
    """A stage's claim on the device: these parts of this role and nothing else. updates: an optimizer step was made.

    EMPTY claims an empty device.
    """

    role: Role | None
    parts: Part
    updates: bool = False


EMPTY = Visit(None, Part(0))


def minimum_bytes(sizes: Mapping[Role, Mapping[Part, int]], visits: Iterable[Visit]) -> dict[Route, int]:
    """Bytes by route for `visits` in order, from an empty device with every host copy up to date. What is still there at the end stays."""
    moved: dict[Route, int] = {}
    present: set[tuple[Role, Part]] = set()
    changed: set[tuple[Role, Part]] = set()

    def move(role: Role, part: Part, direction: Direction) -> None:
        if part is not Part.GRADS and sizes[role][part]:
            route = Route(role, part, direction)
            moved[route] = moved.get(route, 0) + sizes[role][part]

    for visit in visits:
        wanted = {(visit.role, part) for part in visit.parts}
        for key in present - wanted:
            if key in changed:
                move(*key, "to_host")
                changed.discard(key)
        for key in wanted - present:
            move(*key, "to_device")
        present = wanted
        if visit.updates:
            changed |= {key for key in wanted if key[1] is not Part.GRADS}
    return moved

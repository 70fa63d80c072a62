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


class Minimum:
    """Follows visits one by one, from an empty device with every host copy up to date."""

    def __init__(self, sizes: Mapping[Role, Mapping[Part, int]]) -> None:
        self._sizes = sizes
        self._present: set[tuple[Role, Part]] = set()
        self._changed: set[tuple[Role, Part]] = set()

    def follow(self, visit: Visit) -> dict[Route, int]:
        """Bytes by route that must move so that the visit can be made."""
        wanted = {(visit.role, part) for part in visit.parts}
        stored = (self._present - wanted) & self._changed
        loaded = {(role, part) for role, part in wanted - self._present if part is not Part.GRADS}
        self._changed -= stored
        self._present = wanted
        if visit.updates:
            self._changed |= {(role, part) for role, part in wanted if part is not Part.GRADS}
        routes = [Route(*key, "to_host") for key in stored] + [Route(*key, "to_device") for key in loaded]
        return {route: n for route in routes if (n := self._sizes[route.role][route.part])}


def minimum_bytes(sizes: Mapping[Role, Mapping[Part, int]], visits: Iterable[Visit]) -> dict[Route, int]:
    """Bytes by route for all `visits`, in order. What is still on the device after the last one stays there."""
    moved: dict[Route, int] = {}
    minimum = Minimum(sizes)
    for visit in visits:
        for route, num_bytes in minimum.follow(visit).items():
            moved[route] = moved.get(route, 0) + num_bytes
    return moved

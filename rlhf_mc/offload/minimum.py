"""The fewest bytes that must move, from sizes and from what stages ask for. Pure; no torch.

The rules, for one role on the device at a time, with a host copy of every part but gradients:
- what a visit asks for and the visit before it left there is not loaded;
- gradients are never moved: they are zero when an update starts;
- 16-bit params that come together with their fp32 main params are not loaded: they are made from them;
- what leaves goes to the host only if an update changed it since its last copy; a frozen role never does.
Loading less would need a device that keeps a second role; storing less would lose an update.

N params a rank, 16 bit, d data-parallel ranks: an iteration loads 4 x 2N of params and 2 x 12N/d of main params and moments,
and stores 2 x 12N/d and 2 x 2N. With params shared out over the host copies of k ranks of a node, 2N becomes 2N/k.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from rlhf_mc.offload.parts import TRAINING, Part

if TYPE_CHECKING:
    from rlhf_mc.models.role import Role

Direction = Literal["to_host", "to_device"]


@dataclass(frozen=True)
class RoleBytes:
    """Bytes of one role on one rank, by part; `derived` of those of PARAMS can be made from the main params."""

    parts: Mapping[Part, int]
    derived: int = 0

    def shared(self, num_ranks: int) -> RoleBytes:
        """What one of `num_ranks` ranks copies where they share the host copy of the params."""
        params = {Part.PARAMS: self.parts[Part.PARAMS] // num_ranks}
        return RoleBytes({**self.parts, **params}, self.derived // num_ranks)


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


def ppo_visits(actor: Role, critic: Role, frozen: Iterable[Role], actor_rests: bool = False) -> list[Visit]:
    """One iteration of PPO: sync the weights, an empty device while the engine generates, score, train.

    frozen: the roles that only score, in that order.  actor_rests: the critic trains alone.
    The critic is scored last and trained first, the actor trained last and synced first: so each stays for its second visit.
    """
    scoring = [Visit(role, Part.PARAMS) for role in (*frozen, actor, critic)]
    training = [Visit(critic, TRAINING, updates=True)] + ([] if actor_rests else [Visit(actor, TRAINING, updates=True)])
    return [Visit(actor, Part.PARAMS), EMPTY, *scoring, *training]


class Minimum:
    """Follows visits one by one, from an empty device with every host copy up to date."""

    def __init__(self, sizes: Mapping[Role, RoleBytes]) -> None:
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
        moved = {Route(*key, "to_host"): self._sizes[key[0]].parts[key[1]] for key in stored}
        for role, part in loaded:
            derived = self._sizes[role].derived if part is Part.PARAMS and Part.MAIN_PARAMS in visit.parts else 0
            moved[Route(role, part, "to_device")] = self._sizes[role].parts[part] - derived
        return {route: num_bytes for route, num_bytes in moved.items() if num_bytes}


def minimum_bytes(sizes: Mapping[Role, RoleBytes], visits: Iterable[Visit]) -> dict[Route, int]:
    """Bytes by route for all `visits`, in order. What is still on the device after the last one stays there."""
    moved: dict[Route, int] = {}
    minimum = Minimum(sizes)
    for visit in visits:
        for route, num_bytes in minimum.follow(visit).items():
            moved[route] = moved.get(route, 0) + num_bytes
    return moved

"""The fewest bytes that must move, from sizes and from what stages ask for. Pure; no torch.

The rules, for a device that holds what the present visit claims, and a host copy of every part but gradients:
- what a visit asks for and the visit before it left there is not loaded;
- gradients are never moved: they are zero when an update starts;
- 16-bit params that come together with their fp32 main params are not loaded: they are made from them;
- what leaves goes to the host only if an update changed it since its last copy; a frozen role never does.
Loading less would need a device that keeps a role that nobody claims; storing less would lose an update.

N params a rank, 16 bit, d ranks with the same weights: an iteration loads 4 x 2N of params and 2 x 12N/d of main params and moments,
and stores 2 x 12N/d and 2 x 2N. With params shared out over the host copies of k ranks of a node, 2N becomes 2N/k.
M params of draft heads add 12M/d to what is loaded and 12M/d + 2M to what is stored; frozen heads, a load of 2M.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rlhf_mc.models.roles import Role
from rlhf_mc.offload.parts import TRAINING, Part

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
    """A stage's claim on the device: these parts of this role, those of other roles `beside` it, and nothing else.

    updates: an optimizer step of this role was made.  EMPTY claims an empty device.
    """

    role: Role | None
    parts: Part
    updates: bool = False
    beside: Visit | None = None

    def claims(self) -> Iterator[Visit]:
        """The claim of each role; none where the device is to be empty."""
        if self.role is not None:
            yield self
        if self.beside is not None:
            yield from self.beside.claims()

    def with_updates(self, roles: Collection[Role]) -> Visit:
        """The same claims, known to have updated these roles and no others."""
        beside = None if self.beside is None else self.beside.with_updates(roles)
        return self._replace(updates=self.role in roles, beside=beside)

    def wanted(self) -> set[tuple[Role, Part]]:
        """All that is to be on the device."""
        return {(claim.role, part) for claim in self.claims() for part in claim.parts}


EMPTY = Visit(None, Part(0))


def ppo_visits(
    actor: Role,
    critic: Role | None,
    frozen: Iterable[Role],
    actor_rests: bool = False,
    heads: Role | None = None,
    heads_train: bool = True,
) -> list[Visit]:
    """One iteration of PPO: sync the weights, an empty device while the engine generates, score, train.

    critic: None where there is none.  frozen: the roles that only score, in that order.  actor_rests: it does not train, though its heads do.
    heads: the actor's draft heads, which are synced with it, and train beside it where `heads_train`.
    The critic is scored last and trained first, the actor trained last and synced first: so each stays for its second visit.
    """
    heads_sync = None if heads is None else Visit(heads, Part.PARAMS)
    heads_update = None if heads is None or not heads_train else Visit(heads, TRAINING, updates=True)
    critics = [] if critic is None else [critic]
    scoring = [Visit(role, Part.PARAMS) for role in (*frozen, actor, *critics)]
    training = [Visit(role, TRAINING, updates=True) for role in critics]
    if not actor_rests:
        training.append(Visit(actor, TRAINING, updates=True, beside=heads_update))
    elif heads_update is not None:
        training.append(Visit(actor, Part.PARAMS, beside=heads_update))
    return [Visit(actor, Part.PARAMS, beside=heads_sync), EMPTY, *scoring, *training]


def heads_visits(actor: Role, heads: Role) -> list[Visit]:
    """One iteration of training draft heads alone: sync the weights, an empty device while the engine generates, score, train."""
    params = Visit(actor, Part.PARAMS)
    return [params._replace(beside=Visit(heads, Part.PARAMS)), EMPTY, params, params._replace(beside=Visit(heads, TRAINING, updates=True))]


class Minimum:
    """Follows visits one by one, from an empty device with every host copy up to date."""

    def __init__(self, sizes: Mapping[Role, RoleBytes]) -> None:
        self._sizes = sizes
        self._present: set[tuple[Role, Part]] = set()
        self._changed: set[tuple[Role, Part]] = set()

    def follow(self, visit: Visit) -> dict[Route, int]:
        """Bytes by route that must move so that the visit can be made."""
        wanted = visit.wanted()
        stored = (self._present - wanted) & self._changed
        loaded = {(role, part) for role, part in wanted - self._present if part is not Part.GRADS}
        self._changed -= stored
        self._present = wanted
        updated = {claim.role for claim in visit.claims() if claim.updates}
        self._changed |= {(role, part) for role, part in wanted if role in updated and part is not Part.GRADS}
        moved = {Route(*key, "to_host"): self._sizes[key[0]].parts[key[1]] for key in stored}
        for role, part in loaded:
            derived = self._sizes[role].derived if part is Part.PARAMS and (role, Part.MAIN_PARAMS) in wanted else 0
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

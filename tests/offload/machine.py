"""The state machine under random requests, against a model of it that is a dict: run on a rank, with hypothesis there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.on_ranks import make_role
from offload.draft_heads import draft_heads
from offload.on_ranks import HEADS, OPTIM, actor_and_critic, residency_of
from offload.poison import poisoned
from rlhf_mc.models.role import Resident, Role
from rlhf_mc.offload import TRAINING, Part, Residency, ResidencyError, Visit
from rlhf_mc.offload.minimum import Route
from rlhf_mc.offload.neighbours import neighbours
from rlhf_mc.parallel.world import World

ROLES = (Role.ACTOR, Role.CRITIC, Role.REFERENCE, Role.MEDUSA)
STORED = (Part.PARAMS, Part.MAIN_PARAMS, Part.OPTIMIZER)


@dataclass(frozen=True)
class Request:
    """A visit, or an empty device where `role` is None. steps: updates of the role made inside."""

    role: Role | None
    parts: Part
    steps: int
    beside: Request | None = None

    def claims(self) -> Iterator[Request]:
        """What is asked of each role."""
        if self.role is not None:
            yield self
            if self.beside is not None:
                yield self.beside

    def keys(self) -> list[tuple[Role, Part]]:
        """All that is asked for."""
        return [(claim.role, part) for claim in self.claims() for part in claim.parts]


def requests(role: st.SearchStrategy[Role | None], beside: st.SearchStrategy[Request | None]) -> st.SearchStrategy[Request]:
    """Of one role, and what is asked for beside it."""
    parts = st.one_of(st.sampled_from([Part.PARAMS, TRAINING]), st.sampled_from([Part(bits) for bits in range(16)]))
    return st.builds(Request, role=role, parts=parts, steps=st.integers(0, 2), beside=beside)


HEADS_BESIDE = st.one_of(st.none(), requests(st.just(Role.MEDUSA), st.none()))
REQUESTS = requests(st.sampled_from((None, *ROLES)), HEADS_BESIDE)


class Expected:
    """Contents by (role, part), what is present, and what changed since it was last copied to the host."""

    def __init__(self, residency: Residency, num_sharing: int) -> None:
        self.residency = residency
        self.num_sharing = num_sharing
        self.contents: dict[tuple[Role, Part], list[Tensor]] = {}
        for role in ROLES:
            with residency.on_device(role, TRAINING if role is not Role.REFERENCE else Part.PARAMS):
                self.look(role)
        residency.all_off()
        residency.ledger.metrics()
        self.present: set[tuple[Role, Part]] = set()
        self.changed: set[tuple[Role, Part]] = set()

    def tensors(self, key: tuple[Role, Part]) -> list[Tensor]:
        return [tensor for part, _, tensor in self.residency.state(key[0]).tensors() if part is key[1]]

    def look(self, role: Role) -> None:
        """Remembers the values that the role has now."""
        for part in STORED:
            self.contents[role, part] = [tensor.detach().clone() for tensor in self.tensors((role, part))]

    def size(self, key: tuple[Role, Part]) -> int:
        return self.residency.state(key[0]).num_bytes(key[1])

    def copied(self, key: tuple[Role, Part], made: bool = False) -> int:
        """Bytes that this rank copies; `made`: params whose 16-bit values come from the main params."""
        if key[1] is not Part.PARAMS:
            return self.size(key)
        state = self.residency.state(key[0])
        sixteen_bit = sum(a.num_bytes for a in state.arenas[Part.PARAMS] if a.key in state.derived)
        return (self.size(key) - made * sixteen_bit) // self.num_sharing

    def follow(self, request: Request) -> dict[Route, int]:
        """Bytes that must move for this request."""
        wanted = set(request.keys())
        moved = {Route(*key, "to_host"): self.copied(key) for key in self.present - wanted if key in self.changed}
        self.changed -= self.present - wanted
        made = {role for role, part in wanted if part is Part.MAIN_PARAMS}
        loaded = {key for key in wanted - self.present if key[1] is not Part.GRADS}
        moved |= {Route(*key, "to_device"): self.copied(key, made=key[0] in made) for key in loaded}
        self.present = wanted
        return {route: n for route, n in moved.items() if n}

    def step(self, model: Resident) -> None:
        """What an update does: everything changes, and 16-bit params follow their main params."""
        state = self.residency.state(model.role)
        for _, _, tensor in state.tensors():
            if tensor.dtype == torch.float32:
                tensor.detach().add_(0.5)
        if state.derived:
            state.rebuild_params()
        model.version += 1
        self.changed |= {(model.role, part) for part in STORED}
        self.look(model.role)

    def check(self) -> None:
        for role in ROLES:
            for part, arenas in self.residency.state(role).arenas.items():
                here = (role, part) in self.present
                assert all(arena.present == here for arena in arenas), (role, part)
                if here and part is not Part.GRADS:
                    assert all(map(torch.equal, self.tensors((role, part)), self.contents[role, part])), (role, part)
        assert self.residency.resident_bytes == sum(self.size(key) for key in self.present)


def allowed(request: Request) -> bool:
    """The rules of requests, as a user knows them."""
    claims = list(request.claims())
    return len({claim.role for claim in claims}) == len(claims) and all(map(allowed_alone, claims))


def allowed_alone(claim: Request) -> bool:
    """The rules of what is asked of one role."""
    extra = claim.parts & ~Part.PARAMS
    if claim.role is Role.REFERENCE and extra:
        return False
    if extra and Part.PARAMS not in claim.parts:
        return False
    return Part.OPTIMIZER not in claim.parts or Part.MAIN_PARAMS in claim.parts


def serve(residency: Residency, expected: Expected, request: Request) -> None:
    """One request, served and checked."""
    if request.role is None:
        residency.all_off()
        assert residency.ledger.moved() == expected.follow(request)
    elif not allowed(request):
        try:
            with residency.on_device(request.role, request.parts, beside=visit_of(request.beside)):
                raise AssertionError("a request against the rules was served")
        except ResidencyError:
            pass
        assert residency.ledger.moved() == {}
    else:
        visit(residency, expected, request)
    assert residency.ledger.moved() == residency.ledger.minimum()
    residency.ledger.metrics()
    expected.check()


def visit(residency: Residency, expected: Expected, request: Request) -> None:
    """One visit with its updates; new gradients are zero."""
    gradients = [key for key in request.keys() if key[1] is Part.GRADS]
    fresh = [key for key in gradients if key not in expected.present]
    with residency.on_device(request.role, request.parts, beside=visit_of(request.beside)) as model:
        assert model.role is request.role
        assert residency.ledger.moved() == expected.follow(request)
        expected.check()
        assert not any(gradient.any() for key in fresh for gradient in expected.tensors(key))
        for gradient in (gradient for key in gradients for gradient in expected.tensors(key)):
            gradient.fill_(7)
        for claim in request.claims():
            for _ in range(claim.steps if claim.parts == TRAINING else 0):
                expected.step(residency.state(claim.role).model)


def visit_of(claim: Request | None) -> Visit | None:
    """The same claim as Residency takes it."""
    return None if claim is None else Visit(claim.role, claim.parts)


def random_requests(world: World, language: str, value: str, dtype: str, examples: int, share: bool = False) -> int:
    """Serves random sequences of requests; how many were served. Raises at the first that differs from the model."""
    models = actor_and_critic(world, language, value, dtype, distributed=True)
    frozen = make_role(world, language, dtype=dtype)
    frozen.role = Role.REFERENCE
    heads = draft_heads(models[0], HEADS, OPTIM)
    count = 0
    with poisoned(copy_seconds=2e-4):
        residency = residency_of(world, [*models, frozen, heads], shared_by=neighbours(world) if share else None)

        @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
        @given(st.lists(REQUESTS, min_size=1, max_size=30))
        def run(requests: list[Request]) -> None:
            nonlocal count
            expected = Expected(residency, world.grid.copies if share else 1)
            for request in requests:
                serve(residency, expected, request)
                count += 1

        run()
    return count

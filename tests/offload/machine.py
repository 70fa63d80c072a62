"""The state machine under random requests, against a model of it that is a dict: run on a rank, with hypothesis there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.on_ranks import make_role
from offload.on_ranks import actor_and_critic, residency_of
from offload.poison import poisoned
from rlhf_mc.models.role import Role, RoleModel
from rlhf_mc.offload import TRAINING, Part, Residency, ResidencyError
from rlhf_mc.offload.minimum import Route
from rlhf_mc.offload.neighbours import neighbours
from rlhf_mc.parallel.world import World

ROLES = (Role.ACTOR, Role.CRITIC, Role.REFERENCE)
STORED = (Part.PARAMS, Part.MAIN_PARAMS, Part.OPTIMIZER)


@dataclass(frozen=True)
class Request:
    """A visit, or an empty device where `role` is None. steps: updates made inside."""

    role: Role | None
    parts: Part
    steps: int


REQUESTS = st.builds(
    Request,
    role=st.sampled_from((None, *ROLES)),
    parts=st.one_of(st.sampled_from([Part.PARAMS, TRAINING]), st.sampled_from([Part(bits) for bits in range(16)])),
    steps=st.integers(0, 2),
)


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
        wanted = {(request.role, part) for part in request.parts} if request.role else set()
        moved = {Route(*key, "to_host"): self.copied(key) for key in self.present - wanted if key in self.changed}
        self.changed -= self.present - wanted
        made = Part.MAIN_PARAMS in request.parts
        moved |= {Route(*key, "to_device"): self.copied(key, made) for key in wanted - self.present if key[1] is not Part.GRADS}
        self.present = wanted
        return {route: n for route, n in moved.items() if n}

    def step(self, model: RoleModel) -> None:
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
    extra = request.parts & ~Part.PARAMS
    if request.role is Role.REFERENCE and extra:
        return False
    if extra and Part.PARAMS not in request.parts:
        return False
    return Part.OPTIMIZER not in request.parts or Part.MAIN_PARAMS in request.parts


def serve(residency: Residency, expected: Expected, request: Request) -> None:
    """One request, served and checked."""
    if request.role is None:
        residency.all_off()
        assert residency.ledger.moved() == expected.follow(request)
    elif not allowed(request):
        try:
            with residency.on_device(request.role, request.parts):
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
    fresh_gradients = Part.GRADS in request.parts and (request.role, Part.GRADS) not in expected.present
    with residency.on_device(request.role, request.parts) as model:
        assert residency.ledger.moved() == expected.follow(request)
        expected.check()
        gradients = expected.tensors((request.role, Part.GRADS)) if Part.GRADS in request.parts else []
        assert not fresh_gradients or not any(gradient.any() for gradient in gradients)
        for gradient in gradients:
            gradient.fill_(7)
        if request.parts == TRAINING:
            for _ in range(request.steps):
                expected.step(model)


def random_requests(world: World, language: str, value: str, dtype: str, examples: int, share: bool = False) -> int:
    """Serves random sequences of requests; how many were served. Raises at the first that differs from the model."""
    models = actor_and_critic(world, language, value, dtype, distributed=True)
    frozen = make_role(world, language, dtype=dtype)
    frozen.role = Role.REFERENCE
    count = 0
    with poisoned(copy_seconds=2e-4):
        residency = residency_of(world, [*models, frozen], shared_by=neighbours(world) if share else None)

        @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
        @given(st.lists(REQUESTS, min_size=1, max_size=30))
        def run(requests: list[Request]) -> None:
            nonlocal count
            expected = Expected(residency, world.grid.data if share else 1)
            for request in requests:
                serve(residency, expected, request)
                count += 1

        run()
    return count

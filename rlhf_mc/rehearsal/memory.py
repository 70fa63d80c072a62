"""What one rank builds: fake process groups, models and optimizers on the meta device, and an iteration of their moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlhf_mc.config import Settings
from rlhf_mc.medusa.drafter import build_drafter
from rlhf_mc.models.role import Resident, empty_role, start_training
from rlhf_mc.models.roles import VALUE_ROLES, Role, role_paths
from rlhf_mc.offload import ModelState, Residency
from rlhf_mc.offload.host_plan import residency_of
from rlhf_mc.offload.minimum import RoleBytes, Route, Visit, minimum_bytes
from rlhf_mc.offload.neighbours import group_of_neighbours
from rlhf_mc.offload.planned import planned_bytes, planned_visits
from rlhf_mc.offload.sizes import Place
from rlhf_mc.parallel.grids import TrainingGrid
from rlhf_mc.parallel.megatron_cpu import show_cpu_to_megatron
from rlhf_mc.parallel.world import World, build_world, leave_world
from rlhf_mc.rehearsal.stopwatch import Stopwatch

Groups = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Built:
    """groups: by name, the ranks of each process group of this rank, in their order there.  expected: the same, from the grid alone.

    built, planned: bytes of each role, as its meta tensors have them, and as the plan says.  moved, minimum: of one iteration, between
    device and host, as the residency moved them, and the least, from the plan.
    """

    groups: Groups
    expected: Groups
    built: dict[Role, RoleBytes]
    planned: dict[Role, RoleBytes]
    moved: dict[Route, int]
    minimum: dict[Route, int]


@contextmanager
def fake_world(grid: TrainingGrid, seed: int) -> Iterator[World]:
    """Inside, this process is one rank of `grid`, whose collectives do nothing, on the meta device. It must be in no world before."""
    dist.init_process_group("fake", store=FakeStore(), rank=grid.rank, world_size=grid.world_size)
    # torch has meta kernels of all collectives but the coalesced ones, of which megatron uses this one.
    with torch.library._scoped_library("c10d", "IMPL") as library:
        library.impl("allgather_into_tensor_coalesced_", lambda *arguments: FakeWork().boxed(), "Meta")
        try:
            yield build_world(grid, torch.device("meta"), seed)
        finally:
            leave_world()
            show_cpu_to_megatron()


def build_rank(settings: Settings, grid: TrainingGrid, hosts: Sequence[str], watch: Stopwatch) -> Built:
    """Everything that the rank has before its first iteration, but engine and weights; and the moves of an iteration.

    hosts: of each rank.
    """
    paths, offload = role_paths(settings), settings.offload
    with ExitStack() as stack:
        with watch.part("process groups"):
            world = stack.enter_context(fake_world(grid, settings.trainer.seed))
        with watch.part("offload plan"):
            shared_by = group_of_neighbours(world, hosts) if offload.enabled and offload.share_host_copies else None
            planned = planned_bytes(settings, paths, Place.of(grid))
            residency = residency_of(settings, paths, world, shared_by)
        with watch.part("models, buckets, optimizers"):
            states = {role: ModelState.of(model) for role, model in _models(settings, world).items()}
            for state in states.values():
                residency.adopt(state)
        visits = planned_visits(settings, paths)
        with watch.part("moves of an iteration"):
            _make_visits(residency, states, visits)
        sharing = shared_by.size() if shared_by else 1
        shared = {role: size.shared(sharing) for role, size in planned.items()}
        return Built(
            groups=_groups(world, shared_by),
            expected=expected_groups(grid),
            built={role: state.role_bytes() for role, state in states.items()},
            planned=planned,
            moved=residency.ledger.moved(),
            minimum=minimum_bytes(shared, visits) if offload.enabled else {},
        )


def _models(settings: Settings, world: World) -> dict[Role, Resident]:
    """As a run builds them, but for their weights."""
    trained = {Role.ACTOR: settings.actor.optim, Role.CRITIC: settings.critic.optim} if settings.trainer.trains else {}
    models: dict[Role, Resident] = {}
    for role, path in role_paths(settings).items():
        model = empty_role(role, "value" if role in VALUE_ROLES else "language", path, settings, world, role in trained)
        if role in trained:
            start_training(model, settings, trained[role])
        models[role] = model
    if settings.medusa.enabled:
        models[Role.MEDUSA] = build_drafter(settings, models[Role.ACTOR], settings.trains_heads)
    return models


def _make_visits(residency: Residency, states: Mapping[Role, ModelState], visits: Sequence[Visit]) -> None:
    """What a visit updates counts as changed when it ends."""
    for visit in visits:
        if visit.role is None:
            residency.all_off()
            continue
        with residency.on_device(visit.role, visit.parts, beside=visit.beside):
            for claim in visit.claims():
                states[claim.role].model.version += claim.updates


def _groups(world: World, neighbours: dist.ProcessGroup | None) -> Groups:
    groups = {
        "tensor": world.tensor_group,
        "stages": world.stage_group,
        "model": world.model_group,
        "copies": world.copies_group,
        "context": world.context.group,
        "neighbours": neighbours,
    }
    return {name: tuple(dist.get_process_group_ranks(group)) for name, group in groups.items() if group is not None}


def expected_groups(grid: TrainingGrid) -> Groups:
    """By the arithmetic of the grid. The order is that in which a rank's number in the group is counted."""
    t, copy, stage = grid.tensor_rank, grid.copy_rank, grid.stage
    first = grid.data_rank * grid.context
    return {
        "tensor": tuple(grid.rank_at(other, copy, stage) for other in range(grid.tensor)),
        "stages": tuple(grid.rank_at(t, copy, other) for other in range(grid.pipeline)),
        "model": tuple(grid.model_ranks()),
        "copies": tuple(grid.rank_at(t, other, stage) for other in range(grid.copies)),
        "context": tuple(grid.rank_at(t, other, stage) for other in range(first, first + grid.context)),
    }

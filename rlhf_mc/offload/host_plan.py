"""Before any model is built: what the roles will take, whether the hosts have it, and the Residency that follows the plan."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING


from rlhf_mc.config import ConfigError, Settings
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.hf_config import read_shape
from rlhf_mc.models.precision import DTYPES
from rlhf_mc.models.role import Role
from rlhf_mc.offload.ledger import Ledger
from rlhf_mc.offload.minimum import RoleBytes, Visit, heads_visits, ppo_visits
from rlhf_mc.offload.neighbours import neighbours
from rlhf_mc.offload.parts import Part
from rlhf_mc.offload.residency import Residency
from rlhf_mc.offload.sizes import HeadsKind, Place, RoleKind, heads_bytes, role_bytes
from rlhf_mc.offload.text import aligned, readable
from rlhf_mc.parallel.grids import TrainingGrid
from rlhf_mc.parallel.world import World

if TYPE_CHECKING:
    from rlhf_mc.tracking import Trace

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_TRAINED, _VALUE_HEAD = (Role.ACTOR, Role.CRITIC), (Role.CRITIC, Role.REWARD)


def planned_bytes(settings: Settings, paths: Mapping[Role, str], grid: TrainingGrid) -> dict[Role, RoleBytes]:
    """Bytes of each role on this rank, from the config.json at its path and the settings; the actor's draft heads are one more."""
    dtype_bytes, distributed_optimizer = DTYPES[settings.trainer.dtype].itemsize, settings.parallel.distributed_optimizer
    place = Place.of(grid)
    planned = {}
    for role, path in paths.items():
        kind = RoleKind(
            shape=read_shape(path, f"{role.value}.path"),
            value_head=role in _VALUE_HEAD,
            trained=role in _TRAINED and settings.trainer.trains,
            dtype_bytes=dtype_bytes,
            num_positions=settings.longest_sequence,
            distributed_optimizer=distributed_optimizer,
        )
        planned[role] = role_bytes(kind, place)
    if settings.medusa.enabled:
        actor = read_shape(paths[Role.ACTOR], "actor.path")
        heads = HeadsKind(
            shape=HeadsShape.of(settings.medusa, actor),
            model=actor,
            trained=settings.trains_heads,
            dtype_bytes=dtype_bytes,
            distributed_optimizer=distributed_optimizer,
        )
        planned[Role.MEDUSA] = heads_bytes(heads, place)
    return planned


def planned_visits(settings: Settings, paths: Mapping[Role, str], actor_rests: bool = False) -> list[Visit]:
    """One iteration of the run with these roles. actor_rests: one in which the critic warms up."""
    if Role.CRITIC not in paths:
        return heads_visits(Role.ACTOR, Role.MEDUSA)
    frozen = [role for role in (Role.REFERENCE, Role.REWARD) if role in paths]
    heads = Role.MEDUSA if settings.medusa.enabled else None
    return ppo_visits(Role.ACTOR, Role.CRITIC, frozen, actor_rests, heads, settings.trains_heads)


def available_host_bytes() -> int:
    """Memory that this process's host can still give, or its control group, whichever is less."""
    fields = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


def host_needs(
    roles: Mapping[Role, RoleBytes], visits: Iterable[Visit], sharing: int, offload: bool, on_cpu: bool
) -> Counter[str]:
    """Bytes of host memory that this rank takes, by use. On CPU, what stands for the device is host memory too.

    visits: what is on the device together, if roles take turns there.
    """
    needs: Counter[str] = Counter()
    if offload:
        for role, size in roles.items():
            needs[f"{role.value}: host copy"] = sum(n for part, n in size.shared(sharing).parts.items() if part is not Part.GRADS)
    if on_cpu and offload:
        together = {visit: sum(roles[role].parts[part] for role, part in visit.wanted()) for visit in visits}
        largest = max(together, key=together.__getitem__)
        names = " and ".join(claim.role.value for claim in largest.claims())
        needs[f"{names}: while on the device"] = together[largest]
    elif on_cpu:
        needs.update({f"{role.value}: stays": sum(size.parts.values()) for role, size in roles.items()})
    return needs


def refuse_small_host(world: World, needs: Counter[str], available_bytes: int) -> None:
    """Collective over all ranks. Raises ConfigError on every rank where any host has less than its ranks need together."""
    everyone = world.from_everyone((socket.gethostname(), needs, available_bytes))
    for host in dict.fromkeys(name for name, _, _ in everyone):
        ranks = [(use, available) for name, use, available in everyone if name == host]
        total: Counter[str] = sum((use for use, _ in ranks), Counter())
        available = min(available for _, available in ranks)
        if total.total() > available:
            uses = [(use, readable(n)) for use, n in total.items()]
            table = aligned([("use", f"bytes of {len(ranks)} ranks"), *uses, ("all", readable(total.total()))])
            raise ConfigError(
                f"offload: the models need {readable(total.total())} of memory on the host {host}, which has {readable(available)} "
                "to give; share the host copies (offload.share_host_copies=true), shard the optimizer "
                f"(parallel.distributed_optimizer=true), use more hosts, or a smaller model\n{table}"
            )


def plan_residency(settings: Settings, paths: Mapping[Role, str], world: World, trace: Trace | None = None) -> Residency:
    """Collective over all ranks. The Residency for these roles, still without any of them.

    Raises ConfigError where a host is too small.
    """
    offload = settings.offload
    shared_by = neighbours(world) if offload.enabled and offload.share_host_copies else None
    sharing = shared_by.size() if shared_by else 1
    visits = planned_visits(settings, paths)
    needs = host_needs(planned_bytes(settings, paths, world.grid), visits, sharing, offload.enabled, world.on_cpu)
    refuse_small_host(world, needs, available_host_bytes())
    budget = offload.device_budget_gib
    return Residency(
        world,
        [],
        Ledger(),
        enabled=offload.enabled,
        device_budget_bytes=None if budget is None else int(budget * 2**30),
        shared_by=shared_by,
        schedule=visits,
        trace=trace,
    )

"""What a run will ask of device and host: bytes of its roles, the order of its stages, memory of its hosts. Pure; no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlhf_mc.config import Settings
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.hf_config import read_shape
from rlhf_mc.models.roles import TRAINED_ROLES, VALUE_ROLES, Role
from rlhf_mc.offload.minimum import RoleBytes, Visit, heads_visits, ppo_visits
from rlhf_mc.offload.parts import Part
from rlhf_mc.offload.sizes import HeadsKind, Place, RoleKind, heads_bytes, role_bytes

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def planned_bytes(settings: Settings, paths: Mapping[Role, str], place: Place) -> dict[Role, RoleBytes]:
    """Bytes of each role on the rank at `place`, from the config.json at its path and the settings; the actor's draft heads are one more."""
    dtype_bytes, distributed_optimizer = settings.trainer.dtype_bytes, settings.parallel.distributed_optimizer
    planned = {}
    for role, path in paths.items():
        kind = RoleKind(
            shape=read_shape(path, f"{role.value}.path"),
            value_head=role in VALUE_ROLES,
            trained=role in TRAINED_ROLES and settings.trainer.trains,
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
    if settings.trainer.mode == "heads":
        return heads_visits(Role.ACTOR, Role.MEDUSA)
    frozen = [role for role in (Role.REFERENCE, Role.REWARD) if role in paths]
    heads = Role.MEDUSA if settings.medusa.enabled else None
    critic = Role.CRITIC if Role.CRITIC in paths else None
    return ppo_visits(Role.ACTOR, critic, frozen, actor_rests, heads, settings.trains_heads)


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


def available_host_bytes() -> int:
    """Memory that this process's host can still give, or its control group, whichever is less."""
    fields = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available

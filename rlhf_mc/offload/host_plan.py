"""Before any model is built: whether the hosts have what the roles will take, and the Residency that follows the plan."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist

from rlhf_mc.config import ConfigError, Settings
from rlhf_mc.models.roles import Role
from rlhf_mc.offload.ledger import Ledger
from rlhf_mc.offload.neighbours import neighbours
from rlhf_mc.offload.planned import available_host_bytes, host_needs, planned_bytes, planned_visits
from rlhf_mc.offload.residency import Residency
from rlhf_mc.offload.sizes import Place
from rlhf_mc.offload.text import aligned, readable
from rlhf_mc.parallel.world import World

if TYPE_CHECKING:
    from rlhf_mc.tracking import Trace


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
    needs = host_needs(planned_bytes(settings, paths, Place.of(world.grid)), visits, sharing, offload.enabled, world.on_cpu)
    refuse_small_host(world, needs, available_host_bytes())
    return residency_of(settings, paths, world, shared_by, trace)


def residency_of(
    settings: Settings, paths: Mapping[Role, str], world: World, shared_by: dist.ProcessGroup | None, trace: Trace | None = None
) -> Residency:
    """No collective. The Residency for these roles, still without any of them. shared_by: see neighbours.py."""
    offload = settings.offload
    budget = offload.device_budget_gib
    return Residency(
        world,
        [],
        Ledger(),
        enabled=offload.enabled,
        device_budget_bytes=None if budget is None else int(budget * 2**30),
        shared_by=shared_by,
        schedule=planned_visits(settings, paths),
        trace=trace,
    )

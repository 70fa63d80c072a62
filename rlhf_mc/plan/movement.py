"""Bytes that one iteration moves: states between host and device, and weights to the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rlhf_mc.models.roles import Role
from rlhf_mc.offload.minimum import minimum_bytes
from rlhf_mc.offload.parts import Part
from rlhf_mc.plan.case import Case
from rlhf_mc.plan.engine import engine_weight_bytes
from rlhf_mc.plan.memory import ends_of, sharing


@dataclass(frozen=True)
class Moved:
    """Of one rank, the one that moves most, in one iteration after the first. gathered: of params whose host copy ranks share."""

    to_device: int
    to_host: int
    gathered: int
    sync_received: int
    sync_written: int


def offloaded(case: Case, pipeline_stage: int) -> Counter[str]:
    """Bytes that a rank's states move, to_device and to_host: the minimum (offload/minimum.py), which the run's ledger must equal; and
    gathered from ranks that share a host copy.
    """
    if case.placement == "resident":
        return Counter()
    share, resident = sharing(case), {role for role, _ in case.resident()}
    sizes = {role: size.shared(share) for role, size in case.states(pipeline_stage).items() if role not in resident}
    visits = [stage.visit for stage in case.stages if stage.role is None or stage.role in sizes]
    once, twice = (minimum_bytes(sizes, visits * times) for times in (1, 2))
    found: Counter[str] = Counter()
    for route, num_bytes in twice.items():
        num_bytes -= once.get(route, 0)
        found[route.direction] += num_bytes
        if route.part is Part.PARAMS and route.direction == "to_device":
            found["gathered"] += num_bytes * (share - 1)
    return found


def sync_received(case: Case) -> int:
    """Bytes that a rank receives at a weight sync, but for weights that the split leaves whole: its engine's shard without what it has.

    Where rollout TP is not above training TP, it has all of its training shard: HybridFlow's bound (arXiv:2409.19256, table 2). Else it
    has, of its own stage's layers, as many rows as its rollout shard. An engine on ranks of its own receives all.
    """
    parallel, tensor = case.settings.parallel, case.settings.rollout.tensor_parallel
    shard = engine_weight_bytes(case.shapes[Role.ACTOR], tensor, case.dtype_bytes)
    if case.is_apart:
        return shard
    return shard - shard * tensor // (parallel.pipeline * max(parallel.tensor, tensor))


def moved(case: Case) -> Moved:
    """Of the rank that moves most."""
    busiest = max((offloaded(case, end) for end in ends_of(case)), key=lambda found: sum(found.values()))
    syncs = case.settings.trainer.generates and case.has(Role.ACTOR)
    shard = engine_weight_bytes(case.shapes[Role.ACTOR], case.settings.rollout.tensor_parallel, case.dtype_bytes) if syncs else 0
    received = sync_received(case) if syncs else 0
    return Moved(busiest["to_device"], busiest["to_host"], busiest["gathered"], received, shard)

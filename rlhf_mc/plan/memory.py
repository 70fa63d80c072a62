"""Device memory of a rank by stage and owner, and host memory of a node by role and part.

States are exact (offload/sizes.py), kept activations follow models/activations.py to the byte for a micro-batch that is full; what comes
and goes inside a layer, the engine's working memory, and reserves are estimates (machine.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rlhf_mc.models.activations import head_working_bytes, held_bytes, in_flight, working_bytes
from rlhf_mc.models.roles import Role
from rlhf_mc.offload.layout import CHUNK_BYTES
from rlhf_mc.offload.parts import Part
from rlhf_mc.plan.case import Case, Stage
from rlhf_mc.plan.engine import EngineBytes
from rlhf_mc.plan.machine import GIB

#: Owners of device memory, in the order of the picture; of parts, by their states.
PART_OWNERS = {
    Part.PARAMS: "params",
    Part.GRADS: "gradient buckets",
    Part.MAIN_PARAMS: "main params",
    Part.OPTIMIZER: "moments",
}
OWNERS = (
    *PART_OWNERS.values(),
    "activations",
    "working memory",
    "logits chunk",
    "swap bucket",
    "sync buckets",
    "engine weights",
    "KV cache",
    "engine working",
    "communicators",
    "reserve",
)


@dataclass(frozen=True)
class DeviceMemory:
    """A stage on one rank of a pipeline stage (of engines on ranks of their own: None): bytes by owner."""

    stage: str
    pipeline_stage: int | None
    owners: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all owners."""
        return sum(self.owners.values())


def ends_of(case: Case) -> list[int]:
    """The pipeline stages that can have the peak: the first has most micro-batches in flight, the last the head, those between are alike."""
    last = case.settings.parallel.pipeline - 1
    return sorted({0, min(1, last), last})


def device_memory(case: Case, stage: Stage, pipeline_stage: int) -> DeviceMemory:
    """What a rank holds at the most while the stage runs."""
    owners: Counter[str] = Counter()
    _add_states(owners, case, stage, pipeline_stage)
    colocated = not case.is_apart and case.settings.trainer.generates and case.has(Role.ACTOR)
    on_cpu = case.machine.device is None  # where the engine never sleeps
    beside = stage.kind == "score" and case.settings.pipeline.score_while_generating
    if colocated and (on_cpu or beside or stage.kind in ("sync", "generate")):
        engine = EngineBytes.of(case)
        owners["engine weights"] = engine.weights
        if on_cpu or beside or stage.kind == "generate":
            owners["KV cache"], owners["engine working"] = engine.kv_cache, engine.working if stage.kind == "generate" else 0
    if stage.kind == "sync":
        owners["sync buckets"] = int(case.assumed.sync_gib * GIB)
    if stage.kind in ("score", "train"):
        _add_activations(owners, case, stage, pipeline_stage)
    _add_swap(owners, case)
    asleep = colocated and not owners["engine weights"]
    _add_reserve(owners, case, asleep)
    return DeviceMemory(stage.name, pipeline_stage, {owner: owners[owner] for owner in OWNERS if owners[owner]})


def engine_memory(case: Case) -> DeviceMemory:
    """What a rank holds that only runs an engine."""
    engine = EngineBytes.of(case)
    owners = Counter({"engine weights": engine.weights, "KV cache": engine.kv_cache, "engine working": engine.working})
    owners["sync buckets"] = int(case.assumed.sync_gib * GIB)
    _add_reserve(owners, case, asleep=False)
    return DeviceMemory("generate", None, {owner: owners[owner] for owner in OWNERS if owners[owner]})


def _add_states(owners: Counter[str], case: Case, stage: Stage, pipeline_stage: int) -> None:
    sizes, resident = case.states(pipeline_stage), case.resident()
    wanted = stage.visit.wanted() | resident
    for role, size in sizes.items():
        for part, owner in PART_OWNERS.items():
            if (role, part) in wanted:
                owners[owner] += size.parts[part]


def _add_activations(owners: Counter[str], case: Case, stage: Stage, pipeline_stage: int) -> None:
    layers, tokens, trains = case.layers(stage, pipeline_stage), case.tokens(stage), stage.kind == "train"
    if stage.role is Role.ACTOR and stage.name == "train draft heads":
        return  # they read hidden states that were kept on the host
    if trains:
        forwards = in_flight(pipeline_stage, case.settings.parallel.pipeline, num_micro_batches(case, stage), case.chunks)
        owners["activations"] = held_bytes(layers, tokens, forwards)
    owners["working memory"] = working_bytes(layers, tokens, trains)
    # Not needed at the same time, but of other sizes: torch's allocator cannot make one of the other.
    owners["logits chunk"] = head_working_bytes(layers, tokens, trains)


def num_micro_batches(case: Case, stage: Stage) -> int:
    """Of one optimizer step, or one scoring pass, on each data-parallel rank: sequences are never split over micro-batches."""
    sequences = case.settings.mini_batch_sequences if stage.kind == "train" else case.workload.sequences
    a_rank = -(-sequences // case.data)
    together = max(1, int(case.micro_batch_tokens(stage) // case.workload.length))
    return -(-a_rank // together)


def _add_swap(owners: Counter[str], case: Case) -> None:
    """While roles take turns, one bucket of the next role is there beside all that stays; later its place is the activations'."""
    if case.placement == "resident" or case.machine.device is None:
        return
    later = owners["activations"] + owners["working memory"] + owners["logits chunk"]
    owners["swap bucket"] = max(0, min(CHUNK_BYTES, sum(owners[name] for name in PART_OWNERS.values())) - later)


def _add_reserve(owners: Counter[str], case: Case, asleep: bool) -> None:
    assumed, parallel = case.assumed, case.settings.parallel
    if case.machine.device is None:
        owners["reserve"] = int(assumed.process_cpu_gib * GIB + assumed.kept_on_cpu * sum(owners.values()))
        return
    model, replica = parallel.tensor * parallel.pipeline, case.settings.rollout.tensor_parallel
    groups = (parallel.tensor, parallel.context, parallel.pipeline, case.copies, model, replica, case.num_trainers)
    owners["communicators"] = int(sum(size > 1 for size in groups) * assumed.communicator_gib * GIB)
    kept = assumed.context_gib + (assumed.engine_asleep_gib if asleep else 0)
    owners["reserve"] = int(kept * GIB + assumed.fragmentation * case.machine.memory_bytes)


def all_device_memory(case: Case) -> list[DeviceMemory]:
    """Every stage on every kind of rank."""
    rows = [device_memory(case, stage, end) for stage in case.stages for end in ends_of(case)]
    return rows + ([engine_memory(case)] if case.is_apart and case.settings.trainer.generates else [])


# ---- the host


def sharing(case: Case) -> int:
    """Ranks of a node that hold the same params and share their host copy (offload/neighbours.py); 1 where they do not."""
    tensor = case.settings.parallel.tensor
    if not case.settings.offload.share_host_copies or tensor > case.machine.ranks_per_node:
        return 1
    together = min(case.copies, case.machine.ranks_per_node // tensor)
    return together if case.copies % together == 0 else 1


def host_memory(case: Case) -> dict[str, int]:
    """Bytes of the node that holds most, by role and part: host copies, what stands for devices on CPU, and the processes."""
    ranks, needs = case.machine.ranks_per_node, Counter()
    worst = max(ends_of(case), key=lambda end: sum(sum(size.parts.values()) for size in case.states(end).values()))
    resident, share = case.resident(), sharing(case)
    for role, size in case.states(worst).items():
        for part, num_bytes in size.shared(share).parts.items():
            if part is not Part.GRADS and num_bytes and (role, part) not in resident:
                needs[f"{role.value}: {PART_OWNERS[part]}"] = ranks * num_bytes
    if case.heads is not None and case.settings.trains_heads:
        medusa = case.settings.medusa
        needs["draft heads: hidden states"] = ranks * medusa.steps * medusa.step_tokens * case.heads.hidden * case.dtype_bytes
    if case.machine.device is None:
        largest = max(all_device_memory(case), key=lambda row: row.total)
        needs[f"{largest.stage}: in the place of device memory"] = ranks * largest.total
    else:
        needs["processes"] = ranks * int(case.assumed.process_host_gib * GIB)
    return dict(needs)

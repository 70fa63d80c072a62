"""The layouts that fit a machine, by predicted throughput: how ranks are shared out, micro-batches, recomputing, engine, host copies.

Given tensor, context and pipeline sizes, what is left to choose is independent: how to train (micro-batch, recomputing), how to score
(micro-batch), the engine (its ranks and KV cache), and whether ranks share host copies. Each takes the fastest choice that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

from rlhf_mc.config import ConfigError, MicroBatch, Recompute, Settings
from rlhf_mc.models.roles import Role
from rlhf_mc.offload.text import readable
from rlhf_mc.plan.case import Case
from rlhf_mc.plan.engine import least_kv_cache_bytes, useful_kv_cache_bytes
from rlhf_mc.plan.machine import GIB
from rlhf_mc.plan.memory import DeviceMemory, all_device_memory, device_memory, ends_of, host_memory
from rlhf_mc.plan.movement import moved
from rlhf_mc.plan.plan import Plan
from rlhf_mc.plan.times import PassSeconds, copy_seconds, generate_seconds, pass_seconds, sync_seconds

_MOST_STAGES = 16  # of a pipeline
_MOST_CONTEXT = 32
_SEQUENCES_A_MICRO_BATCH = (1, 2, 4, 8)
_KV_STEP_GIB = 0.5
_SECTIONS = {role: role.value for role in (Role.ACTOR, Role.CRITIC, Role.REFERENCE, Role.REWARD)}


@dataclass(frozen=True)
class Choice:
    """Settings that fit best by one measure, with its seconds; over: bytes that the device or node lacks, 0 where it fits."""

    settings: Settings
    seconds: float
    over: int


@dataclass(frozen=True)
class Found:
    """A layout with all its choices made. over_device, over_host: bytes that a device, or a node, lacks."""

    case: Case
    over_device: int
    over_host: int

    @property
    def fits(self) -> bool:
        """Whether nothing is lacking."""
        return not self.over_device and not self.over_host

    def overrides(self) -> list[str]:
        """The settings that say so, for a command line."""
        s = self.case.settings
        values: dict[str, Any] = {
            "parallel.tensor": s.parallel.tensor,
            "parallel.context": s.parallel.context,
            "parallel.pipeline": s.parallel.pipeline,
            "parallel.virtual_pipeline": s.parallel.virtual_pipeline,
            "trainer.recompute": s.trainer.recompute,
            "rollout.tensor_parallel": s.rollout.tensor_parallel,
            "rollout.kv_cache_gib": s.rollout.kv_cache_gib,
            "offload.share_host_copies": str(s.offload.share_host_copies).lower(),
            "actor.micro_batch.tokens": s.actor.micro_batch.tokens,
            "critic.micro_batch.tokens": s.critic.micro_batch.tokens,
        }
        values |= {f"{name}.scoring_micro_batch.tokens": getattr(s, name).scoring_micro_batch.tokens for name in _SECTIONS.values()}
        return [f"{key}={value}" for key, value in values.items()]


def search(case: Case) -> list[Found]:
    """Every way to share out the ranks, each with its best choices; those that fit first, the fastest of them in front."""
    found = [choose(case, *sizes) for sizes in _layouts(case)]
    ranked = [(not one.fits, _seconds(one) if one.fits else one.over_device + one.over_host, place) for place, one in enumerate(found)]
    return [found[place] for *_, place in sorted(ranked)]


def _seconds(found: Found) -> float:
    return Plan.of(found.case).times.iteration


def _layouts(case: Case) -> Iterator[tuple[int, int, int]]:
    """(tensor, context, pipeline) that the models and the number of ranks allow; tensor ranks lie in one node."""
    shapes, ranks = case.shapes.values(), case.num_trainers
    divisors = math.gcd(*(n for shape in shapes for n in (shape.num_heads, shape.num_kv_heads, shape.ffn)))
    layers = math.gcd(*(shape.num_layers for shape in shapes))
    tensors = [t for t in range(1, case.machine.gpus_per_node + 1) if divisors % t == 0 and case.machine.gpus_per_node % t == 0]
    pipelines = [p for p in range(1, _MOST_STAGES + 1) if layers % p == 0]
    contexts = [2**k for k in range(_MOST_CONTEXT.bit_length())]
    most_data = min(case.settings.mini_batch_sequences, case.workload.sequences)
    for tensor, context, pipeline in product(tensors, contexts, pipelines):
        data, rest = divmod(ranks, tensor * context * pipeline)
        if not rest and data <= most_data:
            yield tensor, context, pipeline


def choose(case: Case, tensor: int, context: int, pipeline: int) -> Found:
    """The best choices for these sizes."""
    settings = case.settings
    chunks = settings.parallel.virtual_pipeline
    if pipeline == 1 or any(shape.num_layers % (pipeline * chunks) for shape in case.shapes.values()):
        chunks = 1
    parallel = replace(settings.parallel, tensor=tensor, context=context, pipeline=pipeline, virtual_pipeline=chunks)
    settings = replace(settings, parallel=parallel)
    over = 0
    for best in (_best_training, _best_scoring, _best_engine):
        choice = best(case.variant(settings))
        settings, over = choice.settings, max(over, choice.over)
    copies = _best_copies(case.variant(settings))
    chosen = case.variant(copies.settings)
    return Found(chosen, max(over, _lacking(chosen, all_device_memory(chosen))), copies.over)


def _best(choices: Iterable[Choice]) -> Choice:
    """The fastest that fits, or the one that lacks least."""
    return min(choices, key=lambda choice: (choice.over, choice.seconds))


def _over(case: Case, kind: str) -> int:
    """Bytes that a device lacks in stages of this kind."""
    return _lacking(case, [device_memory(case, stage, end) for stage in case.stages if stage.kind == kind for end in ends_of(case)])


def _lacking(case: Case, rows: Iterable[DeviceMemory]) -> int:
    return max(0, max((row.total for row in rows), default=0) - case.machine.memory_bytes)


def _pass_seconds(case: Case, kind: str) -> float:
    return sum(pass_seconds(case, stage).total for stage in case.stages if stage.kind == kind and stage.name != "train draft heads")


def _sized(settings: Settings, key: str, tokens: int, sections: Iterable[str]) -> Settings:
    """The settings with micro-batches of so many tokens."""
    budget = MicroBatch(tokens=tokens)
    return replace(settings, **{name: replace(getattr(settings, name), **{key: budget}) for name in sections})


def _best_training(case: Case) -> Choice:
    if not case.settings.trainer.trains:
        return Choice(case.settings, 0.0, 0)

    def choices() -> Iterator[Choice]:
        for recompute, times in product(get_args(Recompute), _SEQUENCES_A_MICRO_BATCH):
            trainer = replace(case.settings.trainer, recompute=recompute)
            sized = _sized(case.settings, "micro_batch", times * case.workload.longest, ("actor", "critic"))
            variant = case.variant(replace(sized, trainer=trainer))
            yield Choice(variant.settings, _pass_seconds(variant, "train"), _over(variant, "train"))

    return _best(choices())


def _best_scoring(case: Case) -> Choice:
    def choices() -> Iterator[Choice]:
        for times in _SEQUENCES_A_MICRO_BATCH:
            sized = _sized(case.settings, "scoring_micro_batch", times * case.workload.longest, _SECTIONS.values())
            variant = case.variant(sized)
            yield Choice(sized, _pass_seconds(variant, "score"), _over(variant, "score"))

    return _best(choices())


def _best_engine(case: Case) -> Choice:
    """KV cache takes what a generating device has left, up to what is of use."""
    if not case.settings.trainer.generates or not case.has(Role.ACTOR):
        return Choice(case.settings, 0.0, 0)
    parallel = case.settings.parallel
    model = case.settings.rollout.engine_ranks if case.is_apart else parallel.tensor * parallel.pipeline
    heads = case.shapes[Role.ACTOR].num_heads

    def choices() -> Iterator[Choice]:
        for tensor in (t for t in range(1, model + 1) if model % t == 0 and heads % t == 0 and t <= case.machine.gpus_per_node):
            yield _engine_choice(case, tensor)

    return _best(choices())


def _engine_choice(case: Case, tensor: int) -> Choice:
    def sized(kv_cache_gib: float) -> Case:
        rollout = replace(case.settings.rollout, tensor_parallel=tensor, kv_cache_gib=kv_cache_gib)
        return case.variant(replace(case.settings, rollout=rollout))

    least = math.ceil(least_kv_cache_bytes(sized(_KV_STEP_GIB)) / GIB / _KV_STEP_GIB) * _KV_STEP_GIB
    useful = math.ceil(useful_kv_cache_bytes(sized(_KV_STEP_GIB)) / GIB / _KV_STEP_GIB) * _KV_STEP_GIB
    smallest = sized(least)
    fullest = max(row.total for row in all_device_memory(smallest) if "KV cache" in row.owners)
    free = math.floor((case.machine.memory_bytes - fullest) / GIB / _KV_STEP_GIB) * _KV_STEP_GIB
    variant = sized(least + max(0.0, min(useful - least, free)))
    seconds = generate_seconds(variant) + sync_seconds(variant, moved(variant))
    with_engine = (row for row in all_device_memory(variant) if "engine weights" in row.owners)
    return Choice(variant.settings, seconds, _lacking(variant, with_engine))


def _best_copies(case: Case) -> Choice:
    """Whole host copies where the nodes have room for them: then nothing needs to be gathered."""
    if not case.settings.offload.enabled:
        return Choice(case.settings, 0.0, 0)

    def choices() -> Iterator[Choice]:
        for share in (False, True):
            variant = case.variant(replace(case.settings, offload=replace(case.settings.offload, share_host_copies=share)))
            over = max(0, sum(host_memory(variant).values()) - case.machine.host_bytes)
            yield Choice(variant.settings, copy_seconds(variant, moved(variant)), over)

    return _best(choices())


# ---- why


def search_table(case: Case, found: list[Found], most: int) -> str:
    """The first `most` layouts that fit, why each but the first is slower than it, and the settings of the first."""
    fitting = [one for one in found if one.fits]
    best = fitting[0]
    lines = [f"{len(found)} ways to share out {case.machine.num_gpus} devices, of which {len(fitting)} fit; the fastest by prediction:"]
    for place, one in enumerate(fitting[:most], 1):
        times = Plan.of(one.case).times
        lines.append(f"{place}. {times.samples_per_second:.3g} samples a second, {times.iteration:.4g} s an iteration: {layout_text(one)}")
        if one is not best:
            lines.append(f"   loses to 1: {why_slower(best, one)}")
    return "\n".join([*lines, "settings of 1:", "  " + " ".join(best.overrides())])


def why_slower(best: Found, other: Found) -> str:
    """Where the other layout loses most of its time against the best."""
    fast, slow = Plan.of(best.case).times, Plan.of(other.case).times
    lost = {name: seconds - fast.stages.get(name, 0.0) for name, seconds in slow.stages.items()}
    name = max(lost, key=lost.__getitem__)
    text = f"{name} +{lost[name]:.3g} s"
    if name in slow.passes and name in fast.passes:
        text += f", {_why_pass(fast.passes[name], slow.passes[name])}"
    gained = min(lost, key=lost.__getitem__)
    return text + (f"; {gained} {lost[gained]:.3g} s" if lost[gained] < -0.01 * fast.iteration else "")


def _why_pass(fast: PassSeconds, slow: PassSeconds) -> str:
    reasons = {
        "tensor ranks wait for each other": slow.tensor - fast.tensor,
        "context ranks wait for each other": slow.context - fast.context,
        "the pipeline's ends idle": slow.bubble - fast.bubble,
        "more is computed, or less evenly": slow.compute - fast.compute,
        "gradients go over more, or slower, links": slow.data - fast.data,
    }
    return max(reasons, key=reasons.__getitem__)


def nearest_miss(case: Case, found: list[Found]) -> str:
    """Where nothing fits: what lacks least, and what would make something fit."""
    if not found:
        return f"{case.machine.num_gpus} devices cannot be shared out: no sizes that the models allow divide their number"
    nearest = found[0]
    lines = [f"nothing fits; the nearest is {layout_text(nearest)}:"]
    lines += [f"  {shortage}" for shortage in Plan.of(nearest.case).shortages()]
    fixes = list(_fixes(case, nearest))
    return "\n".join([*lines, "what would make it fit:", *(f"  {fix}" for fix in fixes)])


def _fixes(case: Case, nearest: Found) -> Iterator[str]:
    machine = case.machine
    if nearest.over_device:
        yield f"devices with {readable(device_bytes_that_fit(nearest))} at this number of them"
    if nearest.over_host:
        yield f"hosts with {readable(machine.host_bytes + nearest.over_host)} at this number of devices"
    enough = fewest_gpus(case, start=2 * machine.num_gpus)
    yield f"{enough} devices like these" if enough else "no number of devices like these, up to 64 times as many"
    if not case.settings.offload.enabled:
        yield "offload.enabled=true: roles would take turns"


def device_bytes_that_fit(found: Found) -> int:
    """Memory of a device that would hold this layout: what it has, what lacks, and the allocator's share of that."""
    machine, assumed = found.case.machine, found.case.assumed
    return machine.memory_bytes + math.ceil(found.over_device / (1 - assumed.fragmentation))


def fewest_gpus(case: Case, start: int, grows: Callable[[int], int] = lambda num_gpus: 2 * num_gpus) -> int | None:
    """The first number of devices, from `start` on as it grows, up to 64 times as many, on which some layout fits."""
    num_gpus = start
    while num_gpus <= 64 * start:
        try:
            larger = replace(case, machine=case.machine.with_gpus(num_gpus))
            if any(choose(larger, *sizes).fits for sizes in _layouts(larger)):
                return num_gpus
        except ConfigError:
            return None
        num_gpus = grows(num_gpus)
    return None


def layout_text(found: Found) -> str:
    """Its sizes in a few words."""
    case, s = found.case, found.case.settings
    shared = ", host copies shared" if s.offload.share_host_copies else ""
    return (
        f"tensor {s.parallel.tensor}, context {s.parallel.context}, pipeline {s.parallel.pipeline}, data {case.data}, recompute "
        f"{s.trainer.recompute}, micro-batches of {s.actor.micro_batch.tokens} tokens, rollout tensor {s.rollout.tensor_parallel}, "
        f"KV cache {s.rollout.kv_cache_gib:g} GiB{shared}"
    )

"""Seconds of each stage of an iteration, from FLOPs, bytes and bandwidths. What no sheet gives is in machine.Assumptions.

Nothing here is measured: use it to compare layouts, not to promise dates.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.models.roles import VALUE_ROLES, Role
from rlhf_mc.plan.case import Case, Stage
from rlhf_mc.plan.engine import generate_seconds
from rlhf_mc.plan.memory import num_micro_batches
from rlhf_mc.plan.movement import Moved, moved

_FP32 = 4
_STEP_BYTES = 30  # AdamW, a parameter: main param and two moments read and written, gradient read, bf16 param written


@dataclass(frozen=True)
class PassSeconds:
    """A stage that scores or trains: compute, and what it waits for: tensor, context and data ranks, and the pipeline's ends."""

    compute: float
    tensor: float = 0.0
    context: float = 0.0
    bubble: float = 0.0
    data: float = 0.0

    @property
    def total(self) -> float:
        """All, one after the other: nothing of it overlaps in this code."""
        return self.compute + self.tensor + self.context + self.bubble + self.data


@dataclass(frozen=True)
class Flops:
    """Of one sequence's forward pass through the whole model: 2 a multiply-add (ModelShape.sequence_cost)."""

    linear: float
    attention: float
    head: float

    @staticmethod
    def of(shape: ModelShape, length: float, answers: float, is_value: bool) -> Flops:
        """Of a sequence of `length` tokens, of which so many are predicted."""
        cost = shape.sequence_cost(not is_value, 1)
        seen = length if cost.window is None else min(length, cost.window)
        pairs = seen * seen / 2 + (length - seen) * seen
        return Flops(cost.per_token * length, cost.per_pair * pairs, cost.per_answer * answers)


def pass_seconds(case: Case, stage: Stage) -> PassSeconds:
    """Of one scoring pass, or of all optimizer steps on one rollout. The last pipeline stage, which has the head, sets the pace."""
    settings, work, shape = case.settings, case.workload, case.shapes[stage.role]
    parallel, trains = settings.parallel, stage.kind == "train"
    flops = Flops.of(shape, work.length, work.response, stage.role in VALUE_ROLES)
    again = settings.trainer.recompute if trains else "none"
    passes = 3 if trains else 1  # a backward is two forwards
    linear = flops.linear * (passes + (again == "full"))
    attention = flops.attention * (passes + (again != "none")) * _attention_factor(case)
    stage_flops = (linear + attention) / parallel.pipeline + flops.head * passes
    micro_batches, steps = num_micro_batches(case, stage), _steps(case) if trains else 1
    together = max(1, int(case.micro_batch_tokens(stage) // work.length))
    rate = case.machine.device.tflops * 1e12 * case.assumed.matmul_efficiency
    one = stage_flops * together / (parallel.tensor * parallel.context) / rate
    tensor, context = _tensor_seconds(case, stage, together, again), _context_seconds(case, stage, together, again)
    waits = (parallel.pipeline - 1) / case.chunks * (one + tensor + context)
    return PassSeconds(
        compute=steps * micro_batches * one,
        tensor=steps * micro_batches * tensor,
        context=steps * micro_batches * context,
        bubble=steps * waits,
        data=steps * _step_seconds(case, stage) if trains else 0.0,
    )


def _attention_factor(case: Case) -> float:
    """Of context ranks without the ragged kernel: a masked one, and pairs that it throws away, as a chunk of 1/2c of a sequence sees a
    rectangle to its own end.
    """
    context = case.settings.parallel.context
    return 1.0 if context == 1 or case.has_ragged_kernel else case.assumed.masked_attention * (1 + 1 / (2 * context))


def _steps(case: Case) -> int:
    return case.settings.algorithm.epochs * case.settings.num_minibatches


def _tensor_seconds(case: Case, stage: Stage, sequences: int, again: str) -> float:
    """Of one micro-batch on one stage: all-gathers and reduce-scatters of hidden states, four a layer in a forward.

    A backward has as many, and gathers two inputs once more for the gradients of their weights.
    """
    parallel, shape = case.settings.parallel, case.shapes[stage.role]
    if parallel.tensor == 1:
        return 0.0
    times = 4 if stage.kind == "score" else 14 if again == "full" else 10
    tokens = sequences * case.workload.length / parallel.context
    message = tokens * shape.hidden * case.dtype_bytes * (parallel.tensor - 1) / parallel.tensor
    return times * shape.num_layers / parallel.pipeline * message / _rate(case, parallel.tensor)


def _context_seconds(case: Case, stage: Stage, sequences: int, again: str) -> float:
    """Of one micro-batch on one stage: keys and values gathered in a forward, their gradients scattered in a backward."""
    parallel, shape = case.settings.parallel, case.shapes[stage.role]
    if parallel.context == 1:
        return 0.0
    times = 1 if stage.kind == "score" else 2 if again == "none" else 3
    width = 2 * shape.num_kv_heads * shape.head_dim // parallel.tensor
    message = sequences * case.workload.length * width * case.dtype_bytes * (parallel.context - 1) / parallel.context
    return times * shape.num_layers / parallel.pipeline * message / _rate(case, parallel.tensor * parallel.context)


def _step_seconds(case: Case, stage: Stage) -> float:
    """Of one optimizer step: fp32 gradients scattered, params gathered, over the copies; and AdamW, bound by memory."""
    parallel, shape = case.settings.parallel, case.shapes[stage.role]
    params, copies = shape.num_params / (parallel.tensor * parallel.pipeline), case.copies
    share = copies if parallel.distributed_optimizer else 1
    adam = _STEP_BYTES * params / share / (case.machine.device.hbm_gbs * 1e9 * case.assumed.memory_efficiency)
    if copies == 1:
        return adam
    message = params * (_FP32 + (case.dtype_bytes if share > 1 else _FP32)) * (copies - 1) / copies
    return adam + message / _rate(case, parallel.tensor * copies)


def _rate(case: Case, span: int) -> float:
    return case.machine.bandwidth(span) * case.assumed.link_efficiency


def copy_seconds(case: Case, bytes_moved: Moved) -> float:
    """Of all swaps of states in an iteration: both directions flow at once; shared copies are then gathered over the node."""
    device = case.machine.device
    link = device.host_gbs * 1e9 * case.assumed.link_efficiency
    return max(bytes_moved.to_device, bytes_moved.to_host) / link + bytes_moved.gathered / _rate(case, 1)


def sync_seconds(case: Case, bytes_moved: Moved) -> float:
    """Of one weight sync: what a rank receives, then its shard written in place."""
    parallel = case.settings.parallel
    far = case.is_apart or (parallel.pipeline > 1 and parallel.tensor * case.copies >= case.machine.gpus_per_node)
    span = case.machine.num_gpus if far else parallel.tensor * parallel.pipeline
    written = 2 * bytes_moved.sync_written / (case.machine.device.hbm_gbs * 1e9 * case.assumed.memory_efficiency)
    return bytes_moved.sync_received / _rate(case, span) + written


@dataclass(frozen=True)
class Times:
    """Seconds of an iteration by stage, the copies of states as one stage more. passes: what scoring and training consist of."""

    stages: dict[str, float]
    passes: dict[str, PassSeconds]
    iteration: float
    samples_per_second: float


def predicted_times(case: Case) -> Times:
    """Of all stages. With engines on ranks of their own, generating and scoring go side by side, and the longer one counts."""
    bytes_moved = moved(case)
    stages, passes = {}, {}
    for stage in case.stages:
        if stage.kind == "sync":
            stages[stage.name] = sync_seconds(case, bytes_moved)
        elif stage.kind == "generate":
            stages[stage.name] = generate_seconds(case) if case.has(Role.ACTOR) else 0.0
        elif stage.name != "train draft heads":
            passes[stage.name] = pass_seconds(case, stage)
            stages[stage.name] = passes[stage.name].total
    stages["copies of states"] = copy_seconds(case, bytes_moved)
    total = sum(stages.values())
    if case.is_apart:
        scoring = sum(seconds for name, seconds in stages.items() if name.startswith("score"))
        total -= min(scoring, stages.get("generate", 0.0))
    return Times(stages, passes, total, case.workload.sequences / total if total else 0.0)

"""Forward, and forward with backward, of one role over a whole batch, by megatron-core's schedules (1F1B under pipeline, interleaved
where stages have several chunks).

A batch is cut into micro-batches by a plan that all ranks compute alike; what comes back is one number for each asked
token or sequence, in the batch's order, the same on every rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlhf_mc.batch import SequenceBatch
from rlhf_mc.config import MicroBatch
from rlhf_mc.models.heads import PLAIN, Sampling, TokenLogprobs
from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.models.loss import Loss, LossSum
from rlhf_mc.models.optimizer import step_optimizer
from rlhf_mc.models.role import Head, Resident, RoleModel
from rlhf_mc.parallel.attention_calls import has_ragged_kernel
from rlhf_mc.parallel.context import Context, exchange_numbers
from rlhf_mc.parallel.grids import TrainingGrid
from rlhf_mc.parallel.microbatches import PlannedMicrobatch, plan_microbatches
from rlhf_mc.parallel.packing import Asked, PackedBatch, PackedMicrobatch
from rlhf_mc.parallel.stage_wire import StageWire

HandOver = Callable[[Tensor, PackedMicrobatch], None]


def plan_pass(
    shape: ModelShape,
    head: Head,
    grid: TrainingGrid,
    lengths: Sequence[int],
    answers: Sequence[int],
    budget: MicroBatch,
    together: int = 1,
) -> list[list[PlannedMicrobatch]]:
    """No collective. The micro-batches of one pass, by data-parallel rank; the same on every rank.

    lengths: tokens of each sequence.  answers: how many numbers are asked of it.
    """
    costs = shape.sequence_cost(head == "language", grid.pipeline).of(lengths, answers)
    return plan_microbatches(lengths, costs, budget, grid.data, together, grid.microbatch_multiple)


def _run_schedule(
    model: RoleModel, packed_batch: PackedBatch, budget: MicroBatch, loss: Callable, forward_only: bool, together: int = 1
) -> list:
    """megatron's schedule; what `loss` gave for each micro-batch, on the last stage (elsewhere an empty list).

    A micro-batch is packed when its turn comes, so that what attention keeps of it is there only while it is in flight: until the last
    chunk has taken it.
    """
    world, grid = model.world, model.world.grid
    lengths = packed_batch.batch.lengths.tolist()
    plan = plan_pass(model.shape, model.head, grid, lengths, packed_batch.counts.tolist(), budget, together)[grid.data_rank]
    ragged = has_ragged_kernel(world.device, model.dtype)
    microbatches = (packed_batch.pack(p, grid.tensor, model.table, world.device, world.context, ragged) for p in plan)
    rows = [packed_batch.num_tokens(p, grid.tensor * grid.context) // (grid.tensor * grid.context) for p in plan]

    def forward_step(data: Iterator[PackedMicrobatch], module: torch.nn.Module):
        packed = next(data)
        with _naming_sequences(packed):
            hidden = module(input_ids=packed.tokens[None], position_ids=None, attention_mask=None, packed_seq_params=packed.sequences)
        return hidden, lambda output: _named_loss(loss, output, packed)

    world.show_itself_to_megatron()
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=_for_each_chunk(microbatches, grid.virtual),
        model=model.modules,
        num_microbatches=len(plan),
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        p2p_communicator=StageWire(world.stage_group, model.config, rows, grid),
        pg_collection=model.last_chunk.pg_collection,
    )


@contextmanager
def _naming_sequences(packed: PackedMicrobatch) -> Iterator[None]:
    """An error inside says which sequences it came with."""
    try:
        yield
    except Exception as error:
        numbers = ", ".join(map(str, packed.sequence_ids.unique().tolist()))
        error.add_note(f"with sequences {numbers} of the batch that the pass was given")
        raise


def _named_loss(loss: Callable, output: Tensor, packed: PackedMicrobatch):
    with _naming_sequences(packed):
        return loss(output, packed)


def _for_each_chunk(microbatches: Iterator[PackedMicrobatch], num_chunks: int) -> list[Iterator[PackedMicrobatch]]:
    """The same micro-batches for each chunk. One is made for the chunk that asks first, and let go by the last.

    itertools.tee would keep 57 of them.
    """
    waiting: list[deque[PackedMicrobatch]] = [deque() for _ in range(num_chunks)]

    def another() -> bool:
        for microbatch in microbatches:
            for queue in waiting:
                queue.append(microbatch)
            return True
        return False

    def of_chunk(queue: deque[PackedMicrobatch]) -> Iterator[PackedMicrobatch]:
        while queue or another():
            yield queue.popleft()

    return [of_chunk(queue) for queue in waiting]


def score(
    model: RoleModel,
    batch: SequenceBatch,
    asked: Asked,
    budget: MicroBatch,
    sampling: Sampling = PLAIN,
    hand_over: HandOver | None = None,
) -> Tensor:
    """Collective over all ranks. Forward only, no gradients: float32 on the host, the same on every rank.

    `hand_over` (language head) gets the rows [n, H] that the head reads of each micro-batch that is not a fill, on every rank
    of the last stage; they are good until it returns.

    asked predicted: [number of tokens in loss_mask], log-probs of those tokens (language head) or values before them (value head).
    asked last: [B], the value head at each sequence's last token.
    """
    model.check_present("params")
    packed = PackedBatch.of(batch, asked)
    speaks = model.world.grid.speaks
    result = torch.zeros(packed.num_answers, dtype=torch.float32)

    def collect(hidden: Tensor, microbatch: PackedMicrobatch):
        head_input = model.head_input(hidden, microbatch)
        answers = model.answers(head_input, microbatch, sampling)
        numbers = answers.logprobs if isinstance(answers, TokenLogprobs) else answers
        if speaks and not microbatch.fill:
            result[microbatch.slots] = numbers.float().cpu()
        if hand_over is not None and not microbatch.fill:
            hand_over(head_input, microbatch)
        return hidden.new_zeros(()), {}

    with torch.no_grad():
        _run_schedule(model, packed, budget, collect, forward_only=True)
    return model.world.sum_over_ranks(result)


def _compared(loss: Loss, answers: TokenLogprobs | Tensor, microbatch: PackedMicrobatch, context: Context) -> LossSum:
    """Collective over the context group. `loss` of the answers of all its ranks; the sums are counted on the first of them only."""

    def of_all_ranks(numbers: Tensor) -> Tensor:
        return exchange_numbers(numbers, microbatch.mine.to(numbers.device), microbatch.asked.rows.numel(), context)

    if isinstance(answers, TokenLogprobs):
        part = loss.of(TokenLogprobs(of_all_ranks(answers.logprobs), of_all_ranks(answers.entropy)), microbatch)
    else:
        part = loss.of(of_all_ranks(answers), microbatch)
    return part if context.rank == 0 else LossSum(part.loss, {name: torch.zeros_like(total) for name, total in part.sums.items()})


def accumulate_gradients(
    model: RoleModel,
    batch: SequenceBatch,
    asked: Asked,
    budget: MicroBatch,
    loss: Loss,
    sampling: Sampling = PLAIN,
    together: int = 1,
    beside: Loss | None = None,
) -> dict[str, float]:
    """Collective over all ranks. Forward and backward of `batch`; gradients are added to what the buckets hold, not yet summed over ranks.

    `loss` sees each micro-batch's answers, of each context rank by themselves; a fill is weighed 0 here. `together` neighbouring
    sequences (the two of a pair) always share a micro-batch, and `loss` may compare them: it then sees the answers of all
    context ranks. `beside` is a second loss, of the rows [n, H] that the language head reads; its gradient reaches the
    model too. Returns the sums of both over all micro-batches of all ranks.
    """
    model.check_present("params", "gradients")
    names = loss.names + (() if beside is None else beside.names)
    totals = torch.zeros(len(names), dtype=torch.float64)

    def weighed_loss(hidden: Tensor, microbatch: PackedMicrobatch):
        head_input = model.head_input(hidden, microbatch)
        answers = model.answers(head_input, microbatch, sampling)
        part = loss.of(answers, microbatch) if together == 1 else _compared(loss, answers, microbatch, model.world.context)
        if beside is not None:
            part = part.plus(beside.of(head_input, microbatch))
        counts = model.world.grid.speaks and not microbatch.fill
        if counts:
            totals.add_(torch.stack([part.sums[name].detach().double() for name in names]).cpu())
        return part.loss * float(not microbatch.fill), torch.tensor(1, dtype=torch.int, device=hidden.device), {}

    config = model.config
    config.finalize_model_grads_func = None
    config.grad_scale_func = model.optimizer.scale_loss
    model.accumulating = True
    _run_schedule(model, PackedBatch.of(batch, asked), budget, weighed_loss, forward_only=False, together=together)
    return dict(zip(names, model.world.sum_over_ranks(totals).tolist()))


def zero_gradients(model: Resident) -> None:
    """Empties the gradient buckets; call before the first accumulate_gradients of an update."""
    model.check_present("gradients")
    for ddp in model.ddp:
        ddp.zero_grad_buffer()
    model.optimizer.zero_grad()
    model.accumulating = False


def update(model: RoleModel, lr: float, max_norm: float | None = None) -> float:
    """Collective over all ranks. Sums the gradients over ranks, clips, steps at `lr`; the gradient norm before clipping.

    Where the norm is not finite, or exceeds `max_norm`, no rank steps: the role stays as it is, bit for bit.
    """
    model.check_present("params", "gradients", "optimizer")
    finalize_model_grads(list(model.ddp))
    stepped = False

    def allows(norm: float) -> bool:
        nonlocal stepped
        stepped = not model.world.any_rank(not math.isfinite(norm) or (max_norm is not None and norm > max_norm))
        return stepped

    grad_norm = step_optimizer(model.optimizer, lr, model.world.on_cpu, allows)
    model.version += stepped
    model.accumulating = False
    return grad_norm


def bad_gradients(model: RoleModel) -> list[str]:
    """Names of the params whose gradients, summed as far as this rank has them, are not finite. No collective."""
    return [name for name, param in model.params().items() if not param.main_grad.isfinite().all()]

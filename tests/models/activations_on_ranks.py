"""What the tests of models/activations.py run on ranks (see tests/ranks.py): bytes that autograd keeps between forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, get_args

import torch
from models.on_ranks import make_role
from torch import Tensor

from rlhf_mc.batch import SequenceBatch
from rlhf_mc.config import MicroBatch, Optim, Recompute
from rlhf_mc.models.activations import Layers, Tokens, in_flight, saved_bytes
from rlhf_mc.models.heads import PLAIN, TokenLogprobs
from rlhf_mc.models.loss import Loss, LossSum
from rlhf_mc.models.passes import accumulate_gradients, zero_gradients
from rlhf_mc.models.role import Head, RoleModel
from rlhf_mc.parallel import attention_calls
from rlhf_mc.parallel.attention import PackedSequences
from rlhf_mc.parallel.megatron_cpu import show_cpu_to_megatron
from rlhf_mc.parallel.microbatches import PlannedMicrobatch
from rlhf_mc.parallel.packing import PackedBatch, PackedMicrobatch
from rlhf_mc.parallel.world import World


def _forward(model: RoleModel, packed: PackedMicrobatch) -> Tensor:
    """A scalar of what this stage makes of the micro-batch; a later stage starts from random hidden states."""
    world = model.world
    show_cpu_to_megatron()
    if not world.grid.is_first_stage:
        rows = packed.tokens.numel() // world.grid.tensor
        model.last_chunk.set_input_tensor(torch.randn(rows, 1, model.shape.hidden, dtype=model.dtype, requires_grad=True))
    [module] = model.modules
    hidden = module(input_ids=packed.tokens[None], position_ids=None, attention_mask=None, packed_seq_params=packed.sequences)
    if not world.grid.is_last_stage:
        return hidden
    answers = model.answers(model.head_input(hidden, packed), packed, PLAIN)
    return answers.logprobs.sum() + answers.entropy.sum() if isinstance(answers, TokenLogprobs) else answers.sum()


def _counted(model: RoleModel, run: Callable[[], Any]) -> int:
    """Bytes of the storages that autograd saves during `run`, each once, without those of the model."""
    own = {tensor.untyped_storage().data_ptr() for tensor in model.weights()}
    kept: dict[int, Tensor] = {}  # held here, so that no storage is given out twice

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)


def _packed(model: RoleModel, batch: SequenceBatch) -> PackedMicrobatch:
    """One micro-batch with all of `batch`."""
    world, planned = model.world, PlannedMicrobatch(tuple(range(len(batch))))
    return PackedBatch.of(batch, "predicted").pack(planned, world.grid.tensor, model.table, world.device, world.context)


def counted_in_one_micro_batch(model: RoleModel, batch: SequenceBatch) -> int:
    """Bytes that autograd keeps of one micro-batch with all of `batch`."""
    packed = _packed(model, batch)
    return _counted(model, lambda: _forward(model, packed))


def _tokens(packed: PackedMicrobatch, window: int | None) -> Tokens:
    """What the formula is told of a micro-batch."""
    sequences: PackedSequences = packed.sequences
    masked = [call for call in sequences.calls if not call.is_plain_causal(window)]
    return Tokens(
        held=packed.tokens.numel(),
        answers=packed.rows.numel(),
        queries=sum(call.queries.padded.numel() for call in sequences.calls),
        keys=sum(call.keys.padded.numel() for call in sequences.calls),
        masked_keys=sum(call.keys.padded.numel() for call in masked),
        bias=sum((1 if call.positions is None else call.rows) * call.queries.longest * call.keys.longest for call in masked),
        reordered=sequences.order is not None,
    )


def counted_and_predicted(
    world: World, directory: str, head: Head, batch: SequenceBatch, dtype: str, expands_keys: bool = False
) -> dict[Recompute, tuple[int, int]]:
    """For each kind of recomputing: bytes that one micro-batch with all of `batch` keeps, counted and by formula.

    expands_keys: attention hands its kernel as many key/value heads as it must on a CUDA device.
    """
    found = {}
    with _kernels_of_cuda() if expands_keys else nullcontext():
        for recompute in get_args(Recompute):
            found[recompute] = _of_one_kind(world, directory, head, batch, dtype, recompute, expands_keys)
    return found


@contextmanager
def _kernels_of_cuda() -> Iterator[None]:
    """Inside, PackedAttention believes that its masked kernel wants all heads."""
    usual, attention_calls._masked_kernel_wants_all_heads = attention_calls._masked_kernel_wants_all_heads, lambda device: True
    try:
        yield
    finally:
        attention_calls._masked_kernel_wants_all_heads = usual


def _of_one_kind(
    world: World, directory: str, head: Head, batch: SequenceBatch, dtype: str, recompute: Recompute, expands_keys: bool
) -> tuple[int, int]:
    model = make_role(world, directory, head, Optim(), dtype, recompute=recompute)
    grid, shape, packed = world.grid, model.shape, _packed(model, batch)
    layers = Layers(
        shape=shape,
        tensor=grid.tensor,
        layers=shape.num_layers // grid.pipeline,
        is_first=grid.is_first_stage,
        is_last=grid.is_last_stage,
        value_head=head == "value",
        dtype_bytes=model.dtype.itemsize,
        recompute=recompute,
        expands_keys=expands_keys,
    )
    return _counted(model, lambda: _forward(model, packed)), saved_bytes(layers, _tokens(packed, shape.sliding_window))


def peak_of_schedule(world: World, directory: str, batch: SequenceBatch, recompute: Recompute) -> tuple[int, int]:
    """The most bytes that autograd keeps while a schedule runs with a sequence a micro-batch: counted, and by formula."""
    model = make_role(world, directory, "language", Optim(), "fp32", recompute=recompute)
    own = {tensor.untyped_storage().data_ptr() for tensor in model.weights()}
    kept: Counter[tuple[int, int]] = Counter()
    peak = 0

    class Kept:
        """A saved tensor; its storage counts until the last such is gone."""

        def __init__(self, tensor: Tensor) -> None:
            nonlocal peak
            storage = tensor.untyped_storage()
            self.tensor, self.key = tensor, (storage.data_ptr(), storage.nbytes())
            if self.key[0] not in own:
                kept[self.key] += 1
                peak = max(peak, sum(num_bytes for _, num_bytes in kept))

        def __del__(self) -> None:
            kept[self.key] -= 1
            if kept[self.key] <= 0:
                del kept[self.key]

    loss = Loss(("sum",), lambda answers, _: LossSum(answers.logprobs.sum(), {"sum": answers.logprobs.sum()}))
    zero_gradients(model)
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda saved: saved.tensor):
        accumulate_gradients(model, batch, "predicted", MicroBatch(tokens=None, sequences=1), loss)
    grid, shape, length = world.grid, model.shape, int(batch.lengths[0])
    num_layers = shape.num_layers // (grid.pipeline * grid.virtual)
    layers = Layers(shape, grid.tensor, num_layers, grid.is_first_stage, grid.is_last_stage, False, 4, recompute)
    tokens = Tokens.even(length, length, length - 1)
    without_head = saved_bytes(replace(layers, is_last=False), tokens)
    forwards = in_flight(grid.stage, grid.pipeline, len(batch), grid.virtual)
    return peak, (forwards - 1) * without_head + saved_bytes(layers, tokens)

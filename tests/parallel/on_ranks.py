"""What the tests of parallel/ run on ranks (see tests/ranks.py)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_mc.parallel.attention import PackedAttention, pack_sequences
from rlhf_mc.parallel.context import cut_sequences, exchange_numbers
from rlhf_mc.parallel.logprobs import vocabulary_parallel_logprobs
from rlhf_mc.parallel.reductions import all_reduce, reduce_in_rank_order, reduce_scatter_tensor
from rlhf_mc.parallel.world import World


def sharded_logprobs(
    world: World, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, first_rows: list[int], slopes: Tensor
) -> tuple[Tensor, ...]:
    """Log-probs, entropy, hits with rank r holding the rows from first_rows[r]; then the gradients of slopes . (the first two)."""
    rank = world.tensor_group.rank()
    hidden = hidden.clone().requires_grad_()
    shard = weight[first_rows[rank] : first_rows[rank + 1]].clone().requires_grad_()
    answers = vocabulary_parallel_logprobs(hidden, shard, targets, first_rows[rank], temperature, world.tensor_group)
    (slopes * torch.stack(answers[:2])).sum().backward()
    return *(answer.detach() for answer in answers), hidden.grad, shard.grad


def place(world: World) -> dict[str, Any]:
    """Where the grid says that this rank is, and where megatron's groups say it is."""
    grid = world.grid
    ours = dict(
        tensor=(grid.tensor_rank, grid.tensor),
        pipeline=(grid.stage, grid.pipeline),
        context=(grid.context_rank, grid.context),
        data=(grid.data_rank, grid.data),
        copies=(grid.copy_rank, grid.copies),
        model=grid.model_ranks(),
        first=grid.is_first_stage,
        last=grid.is_last_stage,
    )
    megatrons = dict(
        tensor=(parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()),
        pipeline=(parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()),
        context=(parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()),
        data=(parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()),
        copies=(world.copies_group.rank(), world.copies_group.size()),
        model=dist.get_process_group_ranks(world.model_group),
        first=parallel_state.is_pipeline_first_stage(),
        last=parallel_state.is_pipeline_last_stage(),
    )
    return {"grid": ours, "megatron": megatrons, "speaks": grid.speaks}


def drawn(world: World) -> tuple[float, float, float]:
    """One number of each generator, right after the world was seeded."""
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def summed(world: World, values: Tensor) -> Tensor:
    """values * (rank + 1), summed over all ranks."""
    return world.sum_over_ranks(values * (world.rank + 1))


def context_attention(
    world: World, qkv: list[Tensor], lengths: Tensor, window: int | None, cos: Tensor, sin: Tensor, head_dim: int
) -> tuple[Tensor, list[Tensor]]:
    """Which of the packed tokens lie here; of these the output, and the gradients of the sum of squares of all ranks' outputs."""
    cut = cut_sequences(lengths, world.context.size)
    held = cut.held[world.context.rank]
    sequences = pack_sequences(cut, cos, sin, world.device, world.context)
    heads = qkv[0].size(1)
    config = TransformerConfig(num_layers=1, hidden_size=heads * head_dim, num_attention_heads=heads, kv_channels=head_dim)
    leaves = [x[held].requires_grad_() for x in qkv]
    out = PackedAttention(config, layer_number=1, window=window)(*leaves, attention_mask=None, packed_seq_params=sequences)
    return held, [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def exchanged(world: World, numbers: Tensor, slopes: Tensor, places: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Each context rank gives the numbers at its places; what all have then, and the gradient of slopes . numbers."""
    own = places[world.context.rank]
    mine = numbers[own].requires_grad_()
    whole = exchange_numbers(mine, own, numbers.numel(), world.context)
    (slopes * whole).sum().backward()
    return whole.detach(), mine.grad


@contextmanager
def _in_rank_order(world: World, active: bool) -> Iterator[None]:
    reduce_in_rank_order(active)
    world.show_itself_to_megatron()
    try:
        yield
    finally:
        reduce_in_rank_order(False)


def sum_over_the_world(world: World, parts: list[Tensor], in_rank_order: bool) -> Tensor:
    """Of what each rank has, by rank."""
    values = parts[world.rank].clone()
    with _in_rank_order(world, in_rank_order):
        all_reduce(values, group=world.copies_group)
    return values


def scatter_a_sum(world: World, parts: list[Tensor]) -> Tensor:
    """This rank's share, written over its share of what it gave."""
    values = parts[world.rank].clone()
    share = values.chunk(world.size)[world.rank]
    with _in_rank_order(world, True):
        reduce_scatter_tensor(share, values, group=world.copies_group)
    return share


class _BackendSums(TorchDispatchMode):
    """Counts sums of floating-point numbers over several ranks that torch's backend makes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._torchs = dist.all_reduce

    def __enter__(self) -> _BackendSums:
        dist.all_reduce = self._watched
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        dist.all_reduce = self._torchs
        super().__exit__(*error)

    def _watched(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **others: Any) -> Any:
        self.count += op == dist.ReduceOp.SUM and tensor.is_floating_point() and dist.get_world_size(group) > 1
        return self._torchs(tensor, op=op, group=group, **others)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), keywords: dict | None = None) -> Any:
        if "reduce_scatter" in str(function):
            outputs, scattered = ([x] if isinstance(x, Tensor) else x for x in arguments[:2])
            self.count += sum(x.numel() for x in outputs) < sum(x.numel() for x in scattered)
        return function(*arguments, **keywords or {})


def train_and_watch_sums(world: World, directory: str, distributed_optimizer: bool, in_rank_order: bool) -> dict[str, Any]:
    """Two steps on a small batch: sums that were torch's, the last gradient norm, and the weights afterwards."""
    from models.on_ranks import exported, make_role
    from tiny_models import random_batch

    from rlhf_mc.config import MicroBatch, Optim
    from rlhf_mc.models.loss import Loss, LossSum
    from rlhf_mc.models.passes import accumulate_gradients, update, zero_gradients

    batch = random_batch([9, 13, 5, 20, 11])
    loss = Loss(("loss",), lambda answers, _: LossSum(-answers.logprobs.sum() / 50, {"loss": -answers.logprobs.sum() / 50}))
    with _in_rank_order(world, in_rank_order), _BackendSums() as sums:
        model = make_role(world, directory, "language", Optim(lr=1e-2, eps=1e-3), distributed_optimizer=distributed_optimizer)
        for _ in range(2):
            zero_gradients(model)
            accumulate_gradients(model, batch, "predicted", MicroBatch(tokens=25), loss)
            grad_norm = update(model, 1e-2)
    return {"backend_sums": int(sums.count), "grad_norm": grad_norm, "weights": exported(model)}


def any_of_ranks(world: World, victim: int | None) -> bool:
    """Whether any rank is the victim."""
    return world.any_rank(world.rank == victim)

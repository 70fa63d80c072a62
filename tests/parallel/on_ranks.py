"""What the tests of parallel/ run on ranks (see tests/ranks.py)."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rlhf_mc.parallel.logprobs import vocabulary_parallel_logprobs
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
        data=(grid.data_rank, grid.data),
        model=grid.model_ranks(),
        first=grid.is_first_stage,
        last=grid.is_last_stage,
    )
    megatrons = dict(
        tensor=(parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()),
        pipeline=(parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()),
        data=(parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()),
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

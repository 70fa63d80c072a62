"""Joining and leaving the job: device, process groups, megatron's grid, seeds. One World object says who this rank is."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from rlhf_mc.config import Settings
from rlhf_mc.parallel.context import Context
from rlhf_mc.parallel.grids import TrainingGrid
from rlhf_mc.parallel.job import Bridge, Job, choose_device, start_distributed
from rlhf_mc.parallel.megatron_cpu import show_cpu_to_megatron
from rlhf_mc.parallel.reductions import all_reduce, reduce_in_rank_order, show_reductions_to_megatron

Given = TypeVar("Given")


@dataclass(frozen=True)
class World:
    """This rank's place: its device, the training grid, and the groups that collectives take.

    everyone: all ranks, for tensors on the host (gloo).  The other groups: for tensors on the device. stage_group is the ranks that this
    rank shares its layers' stack with, stage by stage, model_group those that hold one copy of the model, copies_group those that
    hold this rank's shard in each copy.
    context: the ranks that share this rank's sequences.
    """

    rank: int
    size: int
    device: torch.device
    grid: TrainingGrid
    everyone: dist.ProcessGroup
    tensor_group: dist.ProcessGroup
    stage_group: dist.ProcessGroup
    model_group: dist.ProcessGroup
    copies_group: dist.ProcessGroup
    context: Context

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks' devices are CPU cores."""
        return self.device.type == "cpu"

    def show_itself_to_megatron(self) -> None:
        """megatron's modules see this world's device and sums. Again after megatron may have imported more of itself; idempotent."""
        if self.device.type != "cuda":
            show_cpu_to_megatron(self.device)
        show_reductions_to_megatron()

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Collective over all ranks. Sum of a host tensor of any shape, the same bits on every rank."""
        if self.size > 1:
            all_reduce(values, group=self.everyone)
        return values

    def any_rank(self, mine: bool) -> bool:
        """Collective over all ranks. Whether it is so on any of them; one byte a rank."""
        flag = torch.tensor([mine], dtype=torch.uint8)
        if self.size > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.everyone)
        return bool(flag)

    def from_everyone(self, mine: Given) -> list[Given]:
        """Collective over all ranks. What each rank gives, by rank; objects, by pickle."""
        given = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(given, mine, group=self.everyone)
        return given

    def together(self, work: Callable[[], Given], kind: type[Exception]) -> list[Given]:
        """Collective over all ranks. What `work` gives on each, by rank; where it raises an error of this kind on one, all raise one with
        its message and rank. `work` must have taken part in all collectives that the others took part in.
        """
        result, error = None, None
        try:
            result = work()
        except kind as raised:
            error = raised
        outcomes = self.from_everyone((result, None if error is None else str(error)))
        for rank, (_, fault) in enumerate(outcomes):
            if fault is not None:
                raise kind(f"rank {rank}: {fault}") from error
        return [outcome for outcome, _ in outcomes]

    def from_first(self, make: Callable[[], Given]) -> Given:
        """Collective over all ranks. What rank 0 makes, and no other rank; an object, by pickle."""
        given = [make() if self.rank == 0 else None]
        if self.size > 1:
            dist.broadcast_object_list(given, src=0, group=self.everyone)
        return given[0]


def seed_everything(seed: int) -> None:
    """Seeds python, numpy, torch and megatron's tensor-parallel generators, alike on every rank."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def join_world(settings: Settings) -> World:
    """Collective over all ranks. Starts torch.distributed and megatron's grid; what torchrun set in the environment counts.

    Without torchrun's environment the world is one rank. Raises ConfigError for a layout or device that cannot be.
    """
    world, _ = join_job(settings, Job.of(os.environ))
    return world


def join_job(settings: Settings, job: Job) -> tuple[World, Bridge | None]:
    """Collective over all ranks of the job, of which this is one that trains. The world of those that train, and the bridge if any."""
    device = choose_device(settings.trainer.device, job.local_rank)
    grid = TrainingGrid.of(settings.parallel, job.num_trainers, job.rank)
    bridge = start_distributed(job, device)
    reduce_in_rank_order(settings.trainer.deterministic)
    return build_world(grid, device, settings.trainer.seed), bridge


def build_world(grid: TrainingGrid, device: torch.device, seed: int) -> World:
    """Collective over all ranks, which must be in torch.distributed already. Makes megatron's groups for `grid`."""
    if device.type != "cuda":
        show_cpu_to_megatron(device)  # asked for devices while it makes its groups
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=grid.tensor,
        pipeline_model_parallel_size=grid.pipeline,
        virtual_pipeline_model_parallel_size=grid.virtual if grid.virtual > 1 else None,
        context_parallel_size=grid.context,
        create_gloo_process_groups=False,
    )
    seed_everything(seed)
    world = World(
        rank=grid.rank,
        size=grid.world_size,
        device=device,
        grid=grid,
        everyone=dist.group.WORLD,
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        stage_group=parallel_state.get_pipeline_model_parallel_group(),
        model_group=parallel_state.get_model_parallel_group(),
        copies_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        context=Context(grid.context, grid.context_rank, parallel_state.get_context_parallel_group()),
    )
    world.show_itself_to_megatron()
    return world


def leave_world() -> None:
    """Tears down megatron's groups and torch.distributed; leaving without this can turn a finished run into exit 1."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()

"""The trained roles in a checkpoint: on each rank what its optimizer steps, in a safetensors file for each role.

That is all of a role: its 16-bit params are the main params, rounded. Between ranks nothing is saved twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhf_mc.checkpoint.disk import FileRecord, read_tensors, write_tensors
from rlhf_mc.checkpoint.layout import Layout
from rlhf_mc.checkpoint.relayout import describe, file_name, values_for
from rlhf_mc.models.role import Resident, Role
from rlhf_mc.models.stepped import stepped
from rlhf_mc.offload import Residency


@dataclass(frozen=True)
class RolePart:
    """What a rank writes of a role. tensors: to be read from any thread until the role's next update; none where others write."""

    file: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    def write(self, directory: Path) -> list[FileRecord]:
        """Writes the file, if there is something in it. Raises CheckpointError."""
        return [write_tensors(directory / self.file, self.tensors, self.metadata)] if self.tensors else []


def part_of(residency: Residency, role: Role) -> RolePart:
    """Collective over the data-parallel group. This rank's part of a trained role."""
    model = residency.state(role).model
    shards = stepped(model) if _source_rank(model) == model.world.rank else []
    names = [f"{shard.name}:{kind}" for shard in shards for kind in shard.kinds]
    sources = residency.sources(role, [shard.tensor(kind) for shard in shards for kind in shard.kinds])
    return RolePart(file_name(role, model.world.rank), dict(zip(names, sources, strict=True)), describe(shards))


@torch.no_grad()
def read_role(residency: Residency, role: Role, directory: Path, saved: Layout) -> None:
    """Collective over the data-parallel group. Makes a trained role what it was when all ranks of the layout `saved` wrote their parts."""
    model = residency.state(role).model
    wanted = [(shard, kind) for shard in stepped(model) for kind in shard.kinds]
    with residency.rewriting(role, [shard.tensor(kind) for shard, kind in wanted]) as targets:
        if _layout_of(model) != saved:
            values = values_for(model, directory, saved)
            for (shard, kind), target in zip(wanted, targets, strict=True):
                target.copy_(values(shard, kind))
        elif wanted:
            names = [f"{shard.name}:{kind}" for shard, kind in wanted]
            read_tensors(directory / file_name(role, _source_rank(model)), dict(zip(names, targets, strict=True)))


def _layout_of(model: Resident) -> Layout:
    grid = model.world.grid
    return Layout(grid.world_size, grid.tensor, grid.pipeline, model.shards_optimizer, grid.virtual)


def _source_rank(model: Resident) -> int:
    """The rank that writes what this rank steps: itself, or the first of those that all step the same."""
    grid = model.world.grid
    return grid.rank if model.shards_optimizer else grid.rank_at(grid.tensor_rank, 0, grid.stage)

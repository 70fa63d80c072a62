"""The trained roles in a checkpoint: on each rank what its optimizer steps, in a safetensors file for each role.

That is all of a role: its 16-bit params are the main params, rounded. Between ranks nothing is saved twice.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from rlhf_mc.checkpoint.disk import FileRecord, write_tensors
from rlhf_mc.models.role import Resident, Role
from rlhf_mc.models.stepped import stepped
from rlhf_mc.offload import Part, Residency


def write_role(residency: Residency, role: Role, directory: Path) -> list[FileRecord]:
    """Collective over the data-parallel group. Writes this rank's part of a trained role, if it has one, from the host copies.

    Raises CheckpointError.
    """
    model = residency.state(role).model
    shards = stepped(model) if _source_rank(model) == model.world.rank else []
    tensors = {name: tensor for shard in shards for name, tensor in shard.tensors().items()}
    with residency.readable(role) as on_host:
        if not tensors:
            return []
        starts = {f"{shard.name}:start": str(shard.start) for shard in shards}
        return [write_tensors(directory / _file_name(role, model.world.rank), tensors, on_host, starts)]


@torch.no_grad()
def read_role(residency: Residency, role: Role, directory: Path) -> None:
    """Collective over the data-parallel group. Makes a trained role what it was when `write_role` wrote it, on the same layout."""
    with residency.on_device(role, Part.PARAMS | Part.MAIN_PARAMS | Part.OPTIMIZER) as model:
        targets = {name: tensor for shard in stepped(model) for name, tensor in shard.tensors().items()}
        if targets:
            with safe_open(directory / _file_name(role, _source_rank(model)), framework="pt") as file:
                for name, target in targets.items():
                    target.copy_(file.get_tensor(name))
        residency.state(role).rebuild_params()
        model.version += 1


def _source_rank(model: Resident) -> int:
    """The rank that writes what this rank steps: itself, or the first of those that all step the same."""
    grid = model.world.grid
    return grid.rank if model.ddp.ddp_config.use_distributed_optimizer else grid.rank_at(grid.tensor_rank, 0, grid.stage)


def _file_name(role: Role, rank: int) -> str:
    return f"rank{rank:05d}.{role.value}.safetensors"

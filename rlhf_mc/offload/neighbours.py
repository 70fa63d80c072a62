"""The copies of a shard on one node: ranks that hold the same params and share the host's memory."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Sequence

import torch.distributed as dist

from rlhf_mc.parallel.grids import TrainingGrid
from rlhf_mc.parallel.world import World


def neighbours(world: World) -> dist.ProcessGroup | None:
    """Collective over all ranks. The ranks of this node that hold the same shard as this one; None where it is the only one."""
    return group_of_neighbours(world, world.from_everyone(socket.gethostname()))


def group_of_neighbours(world: World, hosts: Sequence[str]) -> dist.ProcessGroup | None:
    """Collective over all ranks. The same, where the host of each rank is known."""
    groups = sharers(world.grid, hosts)
    if not groups:
        return None
    if len(groups[0]) == world.grid.copies:
        return world.copies_group
    # Every rank makes every group, in the same order: new_group is a collective of all.
    made = {ranks: dist.new_group(ranks) for ranks in groups}
    return next(group for ranks, group in made.items() if world.rank in ranks)


def sharers(grid: TrainingGrid, hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """Groups of ranks that hold the same shard on the same host, of all ranks. Pure.

    Where the groups would differ in size, or not divide the copies, storages could not be cut evenly everywhere: then none,
    nor where each rank is alone.
    """
    groups: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    for stage in range(grid.pipeline):
        for tensor_rank in range(grid.tensor):
            for copy_rank in range(grid.copies):
                rank = grid.rank_at(tensor_rank, copy_rank, stage)
                groups[stage, tensor_rank, hosts[rank]].append(rank)
    sizes = {len(ranks) for ranks in groups.values()}
    if len(sizes) != 1 or sizes == {1} or grid.copies % min(sizes):
        return []
    return sorted(tuple(ranks) for ranks in groups.values())

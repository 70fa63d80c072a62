"""The copies of a shard on one node: ranks that hold the same params and share the host's memory."""

from __future__ import annotations

import socket

import torch.distributed as dist

from rlhf_mc.parallel.world import World


def neighbours(world: World) -> dist.ProcessGroup | None:
    """Collective over all ranks. The ranks of this node that hold the same shard as this one; None where it is the only one.

    Where the groups of different ranks would differ in size, storages could not be cut evenly everywhere, so nobody shares.
    """
    mine = (socket.gethostname(), tuple(dist.get_process_group_ranks(world.copies_group)))
    everyone = world.from_everyone(mine)
    groups = sorted({tuple(r for r in ranks if everyone[r][0] == host) for host, ranks in everyone})
    if len({len(ranks) for ranks in groups}) != 1 or len(groups[0]) == 1 or world.grid.copies % len(groups[0]):
        return None
    if len(groups[0]) == world.grid.copies:
        return world.copies_group
    # Every rank makes every group, in the same order: new_group is a collective of all.
    made = {ranks: dist.new_group(ranks) for ranks in groups}
    return next(group for ranks, group in made.items() if world.rank in ranks)

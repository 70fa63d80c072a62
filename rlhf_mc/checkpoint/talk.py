"""What ranks tell each other about files, so that all of them act alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from rlhf_mc.parallel.world import World

Given = TypeVar("Given")


def from_everyone(world: World, mine: Given) -> list[Given]:
    """Collective over all ranks. What each rank gives, by rank."""
    given = [mine] * world.size
    if world.size > 1:
        dist.all_gather_object(given, mine, group=world.everyone)
    return given


def from_first(world: World, make: Callable[[], Given]) -> Given:
    """Collective over all ranks. What rank 0 makes: it alone decides what is on the disk."""
    given = [make() if world.rank == 0 else None]
    if world.size > 1:
        dist.broadcast_object_list(given, src=0, group=world.everyone)
    return given[0]

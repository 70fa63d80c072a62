"""Saving over all ranks: each writes its files, and the whole becomes a checkpoint, or all ranks raise the same error."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlhf_mc.checkpoint.disk import CheckpointError, FileRecord, cannot_write
from rlhf_mc.checkpoint.snapshot import aside_path, make_aside, prune, publish
from rlhf_mc.checkpoint.talk import from_everyone
from rlhf_mc.parallel.world import World

Given = TypeVar("Given")


def save(
    world: World, root: Path, iteration: int, keep_last: int, record: dict[str, Any], write: Callable[[Path], Sequence[FileRecord]]
) -> int:
    """Collective over all ranks. A checkpoint below `root`, after `iteration` iterations; its bytes.

    write: writes this rank's files, under names that no other rank uses, into the directory that it gets.  record: JSON; rank 0's counts.
    Raises CheckpointError on every rank where any rank cannot write; older checkpoints are untouched then.
    """
    aside = aside_path(root, iteration)
    _together(world, lambda: make_aside(root, iteration) if world.rank == 0 else None, root)
    try:
        shares = _together(world, lambda: write(aside), aside)
        files = [file for share in shares for file in share]
        _together(world, lambda: publish(aside, record, files) if world.rank == 0 else None, aside)
    except CheckpointError:
        if world.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    _together(world, lambda: prune(root, keep_last) if world.rank == 0 else None, root)
    return sum(file.num_bytes for file in files)


def _together(world: World, work: Callable[[], Given], path: Path) -> list[Given]:
    """Collective over all ranks. What `work` gives on each rank; where it fails on one to write below `path`, all raise its error."""
    result, error = None, None
    try:
        result = work()
    except OSError as raised:
        error = cannot_write(Path(raised.filename or path), raised)
    except CheckpointError as raised:
        error = raised
    outcomes = from_everyone(world, (result, None if error is None else str(error)))
    for rank, (_, fault) in enumerate(outcomes):
        if fault is not None:
            raise CheckpointError(f"rank {rank}: {fault}") from error
    return [outcome for outcome, _ in outcomes]

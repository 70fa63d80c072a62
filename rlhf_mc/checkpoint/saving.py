"""Saving over all ranks: each writes its files, and the whole becomes a checkpoint, or all ranks raise the same error."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlhf_mc.checkpoint.disk import CheckpointError, FileRecord, cannot_write
from rlhf_mc.checkpoint.snapshot import aside_path, make_aside, prune, publish
from rlhf_mc.parallel.world import World
from rlhf_mc.rollout_files import BackgroundWriter

Given = TypeVar("Given")


class Saving:
    """A checkpoint on its way: a thread of each rank writes, until `publish` waits for all of them.

    The thread is `writer`'s. write: writes this rank's files, under names that no other rank uses, into the directory that it gets.
    record: JSON; rank 0's counts.
    """

    def __init__(
        self,
        world: World,
        root: Path,
        iteration: int,
        record: dict[str, Any],
        write: Callable[[Path], Sequence[FileRecord]],
        writer: BackgroundWriter,
    ) -> None:
        """Collective over all ranks. Begins to write the checkpoint after `iteration` iterations below `root`.

        Raises CheckpointError on every rank where rank 0 cannot make a directory there.
        """
        self.iteration = iteration
        self._world, self._root, self._record, self._writer = world, root, record, writer
        self._aside = aside_path(root, iteration)
        self._files: Sequence[FileRecord] = ()
        self._on_first(lambda: make_aside(root, iteration))

        def work() -> None:
            self._files = write(self._aside)

        writer.submit(work)

    def publish(self, keep_last: int, keep_best: int = 0, best_by: str = "") -> int:
        """Collective over all ranks. Once all files are durable they are a checkpoint, of which only so many stay (`prune`); its bytes.

        Raises CheckpointError on every rank where any rank could not write; older checkpoints are untouched then.
        """
        try:
            shares = self._together(self._written)
            files = [file for share in shares for file in share]
            self._on_first(lambda: publish(self._aside, self._record, files))
        except CheckpointError:
            if self._world.rank == 0:
                shutil.rmtree(self._aside, ignore_errors=True)
            raise
        self._on_first(lambda: prune(self._root, keep_last, keep_best, best_by))
        return sum(file.num_bytes for file in files)

    def _written(self) -> Sequence[FileRecord]:
        error = self._writer.wait()
        if error is not None:
            raise error
        return self._files

    def _on_first(self, work: Callable[[], object]) -> None:
        self._together(lambda: work() if self._world.rank == 0 else None)

    def _together(self, work: Callable[[], Given]) -> list[Given]:
        """Collective over all ranks. What `work` gives on each rank; where it cannot write on one, all raise its error."""

        def named() -> Given:
            try:
                return work()
            except OSError as error:
                raise cannot_write(Path(error.filename or self._aside), error) from error

        return self._world.together(named, CheckpointError)

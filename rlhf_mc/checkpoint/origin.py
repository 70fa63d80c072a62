"""Where a run begins: at the newest checkpoint that is whole, or from nothing."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlhf_mc.checkpoint.disk import STREAMS, FileRecord
from rlhf_mc.checkpoint.snapshot import DamagedError, Snapshot, fault_of, published, read_manifest, read_record
from rlhf_mc.config import ConfigError
from rlhf_mc.parallel.world import World

_RANK = re.compile(r"rank(\d+)")


@dataclass(frozen=True)
class Origin:
    """snapshot: what the run goes on from; None: it begins.  messages: which newer ones are damaged, and where it goes on."""

    snapshot: Snapshot | None = None
    messages: tuple[str, ...] = ()

    @property
    def iteration(self) -> int:
        """The first iteration that is left to do."""
        return 0 if self.snapshot is None else self.snapshot.iteration


def find_origin(world: World, root: Path, resume: str, iterations: int) -> Origin:
    """Collective over all ranks, which share the reading of every byte of a checkpoint.

    resume: trainer.resume.  iterations: of the whole run.  Raises ConfigError on every rank where there are checkpoints, but none
    that is whole, or none is wanted: beginning anew would give them away.
    """
    names = world.from_first(lambda: [path.name for path in published(root)])
    if names and resume == "never":
        raise ConfigError(
            f"trainer.resume: never, but {root} holds checkpoints of a run; set trainer.resume=auto, or name another trainer.output_dir"
        )
    messages: list[str] = []
    for name in names:
        fault = _fault(world, root / name)
        if fault is None:
            snapshot = Snapshot(root / name, read_record(root / name))
            return Origin(snapshot, (*messages, _where(snapshot, iterations)))
        messages.append(f"the checkpoint {root / name} is damaged and skipped: {fault}")
    if messages:
        listed = "\n  ".join(messages)
        raise ConfigError(f"trainer.resume: auto, but no checkpoint is whole; remove {root} to begin anew:\n  {listed}")
    return Origin()


def _where(snapshot: Snapshot, iterations: int) -> str:
    done = snapshot.iteration
    if done >= iterations:
        left = "only the end of the run is made again"
        return f"nothing is left to train: all {iterations} iterations are done in {snapshot.directory}; {left}"
    return f"resumes from {snapshot.directory}: {done} of {iterations} iterations are done"


def _fault(world: World, path: Path) -> str | None:
    """Collective over all ranks. What is wrong with a checkpoint; None where every byte is as it was saved."""
    listed = world.from_first(lambda: _listed(path))
    if isinstance(listed, str):
        return listed
    mine = [file for file in listed if _reader(file) % world.size == world.rank]
    with ThreadPoolExecutor(STREAMS) as streams:
        faults = [fault for fault in streams.map(partial(fault_of, path), mine) if fault]
    return next((fault for share in world.from_everyone(faults) for fault in share), None)


def _reader(file: FileRecord) -> int:
    """The rank that wrote it: on the same layout it loads it, too, and then finds it in its host's memory."""
    found = _RANK.match(file.name)
    return int(found[1]) if found else 0


def _listed(path: Path) -> list[FileRecord] | str:
    """Its files, or what is wrong with the list of them."""
    try:
        return read_manifest(path)
    except DamagedError as error:
        return str(error)

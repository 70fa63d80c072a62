"""The rehearsal: some ranks are built in full, their peers plan beside them, and all are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhf_mc.config import ConfigError, Settings
from rlhf_mc.models.precision import DTYPES
from rlhf_mc.parallel.grids import TrainingGrid
from rlhf_mc.rehearsal.agreement import (
    different,
    missing_slices,
    unmatched_slices,
    wrong_bytes,
    wrong_groups,
    wrong_hands,
    wrong_moves,
    wrong_passes,
    wrong_received,
)
from rlhf_mc.rehearsal.memory import Built, build_rank
from rlhf_mc.rehearsal.stopwatch import Stopwatch
from rlhf_mc.rehearsal.view import View, view_of
from rlhf_mc.rehearsal.workload import Workload

_ENGINE_PEERS = 2  # of ranks that only run engines: each plans for all ranks of the job


@dataclass(frozen=True)
class Rehearsed:
    """One rank in full. built: None on a rank that only runs an engine."""

    view: View
    built: Built | None
    watch: Stopwatch


def smallest_size(settings: Settings) -> int:
    """Ranks of the smallest job that these settings allow: one copy of the model, and the engines."""
    parallel = settings.parallel
    return parallel.tensor * parallel.pipeline * parallel.context + settings.rollout.engine_ranks


def check_rehearsable(settings: Settings, size: int) -> None:
    """Raises ConfigError where a run of these settings on `size` ranks could not start, or is no PPO."""
    settings.check("train", size)
    if settings.trainer.mode != "ppo":
        raise ConfigError(f"trainer.mode={settings.trainer.mode}: only whole iterations of PPO are rehearsed; set trainer.mode=ppo")


def rehearse_rank(settings: Settings, size: int, rank: int, ranks_per_node: int) -> Rehearsed:
    """All that rank `rank` of `size` builds and plans, with the seconds of each part. The process must be in no world."""
    if not 0 <= rank < size:
        raise ConfigError(f"--rank {rank}: not one of the {size} ranks")
    watch, workload = Stopwatch(), Workload.of(settings)
    trainers = settings.num_trainer_ranks("train", size)
    built = None
    if rank < trainers:
        hosts = [f"node{other // ranks_per_node}" for other in range(trainers)]
        built = build_rank(settings, TrainingGrid.of(settings.parallel, trainers, rank), hosts, watch)
    return Rehearsed(view_of(settings, size, rank, workload, watch), built, watch)


def peers_of(settings: Settings, size: int, rehearsed: Rehearsed) -> list[View]:
    """What the ranks that exchange weights with this one plan, each by itself; with engines apart, some of them."""
    sync = rehearsed.view.sync
    others = [position for position in range(len(sync.ranks)) if position != sync.position]
    if settings.rollout.engine_ranks:
        met = {block.target for share in sync.shares for block in share.sends}
        met |= {block.source for share in sync.shares for block in share.receives}
        others = sorted(met)[:_ENGINE_PEERS]
    workload = Workload.of(settings)
    return [view_of(settings, size, sync.ranks[position], workload, Stopwatch()) for position in others]


def faults(settings: Settings, size: int, rehearsed: Sequence[Rehearsed], peers: Sequence[Sequence[View]]) -> Iterator[str]:
    """What the ranks disagree in; nothing where the job would run. peers: of each rehearsed rank."""
    trainers = settings.num_trainer_ranks("train", size)
    for one, others in zip(rehearsed, peers, strict=True):
        yield from _sync_faults(settings, [one.view, *others])
    views = [view for one, others in zip(rehearsed, peers) for view in (one.view, *others) if view.rollout is not None]
    yield from different("prompts and schedule", {view.rank: view.rollout for view in views})
    yield from different("micro-batches", {view.rank: view.passes for view in views})
    if views:
        yield from _plan_faults(settings, TrainingGrid.of(settings.parallel, trainers, 0), views[0])
    built = {one.view.rank: one.built for one in rehearsed if one.built is not None}
    yield from wrong_groups({rank: b.groups for rank, b in built.items()}, {rank: b.expected for rank, b in built.items()})
    for rank, b in built.items():
        yield from wrong_bytes(rank, b.built, b.planned)
        yield from wrong_moves(rank, b.moved, b.minimum)


def _sync_faults(settings: Settings, views: Sequence[View]) -> Iterator[str]:
    syncs = {view.sync.position: view.sync for view in views}
    shares = {position: sync.shares for position, sync in syncs.items()}
    yield from different("ranks of the weight sync", {view.rank: view.sync.ranks for view in views})
    yield from unmatched_slices(shares)
    for position, sync in syncs.items():
        yield from missing_slices(position, sync.shares, sync.wanted, sync.shapes)
        yield from wrong_received({position: sync.shares}, sync.received, DTYPES[settings.trainer.dtype].itemsize)


def _plan_faults(settings: Settings, grid: TrainingGrid, view: View) -> Iterator[str]:
    yield from wrong_hands(view.rollout.hands, settings.num_sequences)
    for name, plan in view.passes.items():
        num_sequences = settings.num_sequences if name.startswith("score") else settings.mini_batch_sequences
        yield from wrong_passes(name, plan, num_sequences, grid.microbatch_multiple)

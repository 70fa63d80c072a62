"""View: all that a rank plans by itself, from the settings and its place alone. Peers that plan otherwise would hang or lose weights."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_mc.algorithms.minibatches import mini_batch_indices
from rlhf_mc.config import MicroBatch, Settings
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.hf_config import ModelShape, read_shape
from rlhf_mc.models.passes import plan_pass
from rlhf_mc.models.precision import DTYPES
from rlhf_mc.models.roles import TRAINED_ROLES, VALUE_ROLES, Role, role_paths
from rlhf_mc.parallel.grids import RolloutGrid, TrainingGrid
from rlhf_mc.parallel.microbatches import PlannedMicrobatch
from rlhf_mc.parallel.reshard import Piece, ReshardPlan, Share, Shapes
from rlhf_mc.pipeline.chunks import Chunker
from rlhf_mc.pipeline.dispatch import ResponseLengths, SampleRequest, deal, requests_for
from rlhf_mc.pipeline.schedule import FIRST_CHUNKS, Operation, operations_of
from rlhf_mc.pipeline.weight_sync import plan_sync_apart, plan_sync_here, synced_shapes, wanted_pieces
from rlhf_mc.rehearsal.stopwatch import Stopwatch
from rlhf_mc.rehearsal.workload import Workload

_SCORING = (Role.REFERENCE, Role.REWARD, Role.ACTOR, Role.CRITIC)
Passes = dict[str, list[list[PlannedMicrobatch]]]


@dataclass(frozen=True)
class SyncPart:
    """One rank's part in the weight sync. ranks: of the job, that take part.  position: this one's place among them.

    shares: in each bucket.  wanted: the pieces of its engine's shard, of tensors with these `shapes`.  received: bytes by position.
    """

    ranks: tuple[int, ...]
    position: int
    shares: tuple[Share, ...]
    wanted: tuple[Piece, ...]
    shapes: Shapes
    received: tuple[int, ...]


@dataclass(frozen=True)
class Rollout:
    """Who samples what, and the order of the work on it."""

    requests: list[SampleRequest]
    hands: list[list[int]]
    chunk_sizes: list[int]
    operations: list[Operation]


@dataclass(frozen=True)
class View:
    """rank: of the job.  rollout, passes: None and empty on a rank that only runs an engine.

    passes: micro-batches by data-parallel rank.
    """

    rank: int
    sync: SyncPart
    rollout: Rollout | None
    passes: Passes


def view_of(settings: Settings, size: int, rank: int, workload: Workload, watch: Stopwatch) -> View:
    """What rank `rank` of `size` plans; no collective, no process groups."""
    trainers = settings.num_trainer_ranks("train", size)
    grid = TrainingGrid.of(settings.parallel, trainers, rank) if rank < trainers else None
    with watch.part("weight sync plan"):
        sync = _sync_of(settings, size, rank)
    if grid is None:
        return View(rank, sync, None, {})
    with watch.part("prompts to replicas, schedule"):
        rollout = _rollout_of(settings, size, grid, workload)
    with watch.part("micro-batches"):
        passes = _passes_of(settings, grid, workload)
    return View(rank, sync, rollout, passes)


def _sync_of(settings: Settings, size: int, rank: int) -> SyncPart:
    shape = read_shape(settings.actor.path, "actor.path")
    heads, tensor = HeadsShape.if_enabled(settings.medusa, shape), settings.rollout.tensor_parallel
    element_bytes = DTYPES[settings.trainer.dtype].itemsize
    trainers = settings.num_trainer_ranks("train", size)
    if trainers == size:
        grid = RolloutGrid(TrainingGrid.of(settings.parallel, size, rank), tensor)
        plan, ranks = plan_sync_here(shape, grid, element_bytes, heads), grid.training.model_ranks()
        return _part_of(plan, ranks, rank, shape, heads, grid)
    engines = RolloutGrid.apart(size - trainers, max(rank - trainers, 0), tensor)
    training = TrainingGrid.of(settings.parallel, trainers, min(rank, trainers - 1))
    plan = plan_sync_apart(shape, training, engines, element_bytes, heads)
    return _part_of(plan, list(range(size)), rank, shape, heads, engines if rank >= trainers else None)


def _part_of(
    plan: ReshardPlan, ranks: list[int], rank: int, shape: ModelShape, heads: HeadsShape | None, grid: RolloutGrid | None
) -> SyncPart:
    position = ranks.index(rank)
    wanted = () if grid is None else tuple(wanted_pieces(shape, heads, grid, grid.tensor_rank))
    return SyncPart(tuple(ranks), position, tuple(plan.shares(position)), wanted, synced_shapes(shape, heads), plan.received)


def _rollout_of(settings: Settings, size: int, grid: TrainingGrid, workload: Workload) -> Rollout:
    sampling, engines = settings.rollout, size - grid.world_size
    rollout_grid = RolloutGrid.apart(engines, 0, sampling.tensor_parallel) if engines else RolloutGrid(grid, sampling.tensor_parallel)
    requests = requests_for(workload.prompts, sampling, settings.trainer.seed, iteration=0)
    expected = ResponseLengths().expected_tokens(workload.prompts)
    hands = deal(expected, sampling.samples_per_prompt, rollout_grid.num_replicas)
    chunker = Chunker(
        len(workload.prompts), sampling.samples_per_prompt, settings.pipeline.chunks or FIRST_CHUNKS, settings.pipeline.chunk_by
    )
    roles = [role.value for role in _SCORING if role in role_paths(settings)]
    return Rollout(requests, hands, chunker.sizes, operations_of(settings, roles, len(chunker.sizes)))


def _passes_of(settings: Settings, grid: TrainingGrid, workload: Workload) -> Passes:
    """Of one iteration: each role scores the whole rollout in one pass, and the trained ones take each mini-batch of each epoch."""
    paths, passes = role_paths(settings), {}
    shapes = {role: read_shape(path, f"{role.value}.path") for role, path in paths.items()}

    def planned(role: Role, samples: list[int], budget: MicroBatch) -> list[list[PlannedMicrobatch]]:
        lengths = [workload.lengths[sample] for sample in samples]
        answers = [1 if role is Role.REWARD else workload.responses[sample] for sample in samples]
        return plan_pass(shapes[role], "value" if role in VALUE_ROLES else "language", grid, lengths, answers, budget)

    everything = list(range(len(workload.responses)))
    for role in (role for role in _SCORING if role in paths):
        passes[f"score {role.value}"] = planned(role, everything, getattr(settings, role.value).scoring_micro_batch)
    for role in (role for role in TRAINED_ROLES if role in paths and settings.trainer.trains):
        for epoch in range(settings.algorithm.epochs):
            mini_batches = mini_batch_indices(settings.trainer.seed, 0, epoch, len(everything), settings.num_minibatches)
            for number, indices in enumerate(mini_batches):
                budget = getattr(settings, role.value).micro_batch
                passes[f"train {role.value} {epoch}.{number}"] = planned(role, indices.tolist(), budget)
    return passes

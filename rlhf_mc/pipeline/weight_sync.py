"""What a weight sync needs, made once: the plan from the actor's shards to the engine's, and the sequence that proves each sync."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rlhf_mc.batch import SequenceBatch
from rlhf_mc.medusa import shape as medusa
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.models.weight_layout import Shard, engine_pieces, hf_shapes, pieces_of
from rlhf_mc.parallel.exchange import Reshard
from rlhf_mc.parallel.grids import RolloutGrid, TrainingGrid
from rlhf_mc.parallel.reshard import Piece, ReshardPlan, Shapes, plan_reshard
from rlhf_mc.parallel.wire import GroupWire

if TYPE_CHECKING:  # a rank that only runs an engine does without megatron
    from rlhf_mc.models.role import RoleModel

BUCKET_BYTES = 64 << 20  # large enough that the collective runs at its full rate, small beside a shard
_LONGEST_PROBE = 32


def plan_weight_sync(actor: RoleModel, grid: RolloutGrid, heads: HeadsShape | None = None, bucket_bytes: int = BUCKET_BYTES) -> Reshard:
    """How the actor's shards, and those of its draft heads, become the engine's, on the ranks of one copy of the model. No collective."""
    plan = plan_sync_here(actor.shape, grid, actor.dtype.itemsize, heads, bucket_bytes)
    return Reshard(plan, GroupWire(actor.world.model_group), actor.world.device, actor.dtype)


def plan_sync_here(
    shape: ModelShape, grid: RolloutGrid, element_bytes: int, heads: HeadsShape | None = None, bucket_bytes: int = BUCKET_BYTES
) -> ReshardPlan:
    """The plan of a sync to engines on the trainer's ranks. The same on every rank of one copy of the model; no collective."""
    training = grid.training
    return plan_reshard(
        held=_held(shape, heads, training, training.model_ranks()),
        wanted=[wanted_pieces(shape, heads, grid, shard) for shard in grid.shards_of_model()],
        shapes=synced_shapes(shape, heads),
        element_bytes=element_bytes,
        bucket_bytes=bucket_bytes,
        training_tensor=training.tensor,
        rollout_tensor=grid.tensor,
    )


def plan_sync_apart(
    shape: ModelShape,
    trainer: TrainingGrid,
    engines: RolloutGrid,
    element_bytes: int,
    heads: HeadsShape | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> ReshardPlan:
    """How the trainer's shards become those of engines on ranks of their own, which are the job's ranks after the trainer's.

    All copies of a shard take part in sending it. The same on every rank; no collective.
    """
    shards = [shard for _ in range(engines.num_replicas) for shard in range(engines.tensor)]
    wanted = [wanted_pieces(shape, heads, engines, shard) for shard in range(engines.tensor)]
    return plan_reshard(
        held=[*_held(shape, heads, trainer, range(trainer.world_size)), *([] for _ in shards)],
        wanted=[*([] for _ in range(trainer.world_size)), *(wanted[shard] for shard in shards)],
        shapes=synced_shapes(shape, heads),
        element_bytes=element_bytes,
        bucket_bytes=bucket_bytes,
        training_tensor=trainer.tensor,
        rollout_tensor=engines.tensor,
    )


def _held(shape: ModelShape, heads: HeadsShape | None, grid: TrainingGrid, ranks: Iterable[int]) -> list[list[Piece]]:
    """The pieces of the actor, and on the last stage of its heads, on each of these ranks; one list for the copies of a shard."""
    of_shard: dict[tuple[int, int], list[Piece]] = {}
    held = []
    for place in (replace(grid, rank=rank) for rank in ranks):
        shard = place.stage, place.tensor_rank
        if shard not in of_shard:
            of_shard[shard] = _held_at(shape, heads, place)
        held.append(of_shard[shard])
    return held


def _held_at(shape: ModelShape, heads: HeadsShape | None, place: TrainingGrid) -> list[Piece]:
    pieces = pieces_of(shape, Shard.of(shape, place, value_head=False))
    if heads is not None and place.is_last_stage:
        pieces += medusa.trainer_pieces(heads, shape.padded_vocab(place.tensor), place.tensor, place.tensor_rank)
    return pieces


def wanted_pieces(shape: ModelShape, heads: HeadsShape | None, grid: RolloutGrid, shard: int) -> list[Piece]:
    """The pieces of one engine rank."""
    pieces = engine_pieces(shape, grid.tensor, shard)
    return pieces if heads is None else pieces + medusa.engine_pieces(heads, grid.tensor, shard)


def synced_shapes(shape: ModelShape, heads: HeadsShape | None) -> Shapes:
    """Of all tensors that a sync sends."""
    return hf_shapes(shape, value_head=False) | ({} if heads is None else heads.tensors())


def probe_sequence(prompt: list[int], vocab: int, max_tokens: int) -> SequenceBatch:
    """What both sides are asked about: a prompt, cut or filled with tokens of the whole vocabulary to 32 tokens, or `max_tokens`.

    The same for the same arguments: every rank makes it for itself.
    """
    length = min(max_tokens, _LONGEST_PROBE)
    filling = torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([torch.tensor(prompt, dtype=torch.int64), filling])[:length]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0] = False
    return SequenceBatch(tokens, torch.tensor([length]), mask)

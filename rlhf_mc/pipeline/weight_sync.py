"""What a weight sync needs, made once: the plan from the actor's shards to the engine's, and the sequence that proves each sync."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rlhf_mc.batch import SequenceBatch
from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.models.weight_layout import Shard, engine_pieces, hf_shapes, pieces_of
from rlhf_mc.parallel.exchange import Reshard
from rlhf_mc.parallel.grids import RolloutGrid, TrainingGrid
from rlhf_mc.parallel.reshard import Piece, ReshardPlan, plan_reshard
from rlhf_mc.parallel.wire import GroupWire

if TYPE_CHECKING:  # a rank that only runs an engine does without megatron
    from rlhf_mc.models.role import RoleModel

BUCKET_BYTES = 64 << 20  # large enough that the collective runs at its full rate, small beside a shard
_LONGEST_PROBE = 32


def plan_weight_sync(actor: RoleModel, grid: RolloutGrid, bucket_bytes: int = BUCKET_BYTES) -> Reshard:
    """How the actor's shards become the engine's, on the ranks of one copy of the model. No collective."""
    world, shape = actor.world, actor.shape
    plan = plan_reshard(
        held=_held(shape, world.grid, world.grid.model_ranks()),
        wanted=[engine_pieces(shape, grid.tensor, shard) for shard in grid.shards_of_model()],
        shapes=hf_shapes(shape, value_head=False),
        element_bytes=actor.dtype.itemsize,
        bucket_bytes=bucket_bytes,
        training_tensor=world.grid.tensor,
        rollout_tensor=grid.tensor,
    )
    return Reshard(plan, GroupWire(world.model_group), world.device, actor.dtype)


def plan_sync_apart(
    shape: ModelShape, trainer: TrainingGrid, engines: RolloutGrid, element_bytes: int, bucket_bytes: int = BUCKET_BYTES
) -> ReshardPlan:
    """How the trainer's shards become those of engines on ranks of their own, which are the job's ranks after the trainer's.

    All data-parallel copies of a shard take part in sending it. The same on every rank; no collective.
    """
    shards = [shard for replica in range(engines.num_replicas) for shard in range(len(engines.ranks_of(replica)))]
    return plan_reshard(
        held=[*_held(shape, trainer, range(trainer.world_size)), *([] for _ in shards)],
        wanted=[*([] for _ in range(trainer.world_size)), *(engine_pieces(shape, engines.tensor, shard) for shard in shards)],
        shapes=hf_shapes(shape, value_head=False),
        element_bytes=element_bytes,
        bucket_bytes=bucket_bytes,
        training_tensor=trainer.tensor,
        rollout_tensor=engines.tensor,
    )


def _held(shape: ModelShape, grid: TrainingGrid, ranks: Iterable[int]) -> list[list[Piece]]:
    """The pieces of the actor on each of these ranks."""
    places = [replace(grid, rank=rank) for rank in ranks]
    return [
        pieces_of(shape, Shard.of(shape, place.tensor, place.tensor_rank, place.pipeline, place.stage, value_head=False)) for place in places
    ]


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

"""What a weight sync needs, made once: the plan from the actor's shards to the engine's, and the sequence that proves each sync."""

from __future__ import annotations

import torch

from rlhf_mc.batch import SequenceBatch
from rlhf_mc.models.role import RoleModel
from rlhf_mc.models.weight_layout import Shard, engine_pieces, hf_shapes, pieces_of
from rlhf_mc.parallel.exchange import Reshard
from rlhf_mc.parallel.grids import RolloutGrid
from rlhf_mc.parallel.reshard import plan_reshard

BUCKET_BYTES = 64 << 20  # large enough that the collective runs at its full rate, small beside a shard
_LONGEST_PROBE = 32


def plan_weight_sync(actor: RoleModel, grid: RolloutGrid, bucket_bytes: int = BUCKET_BYTES) -> Reshard:
    """How the actor's shards become the engine's, on the ranks of one copy of the model. No collective."""
    world, shape = actor.world, actor.shape
    places = [(stage, rank) for stage in range(world.grid.pipeline) for rank in range(world.grid.tensor)]
    shards = [Shard.of(shape, world.grid.tensor, rank, world.grid.pipeline, stage, value_head=False) for stage, rank in places]
    plan = plan_reshard(
        held=[pieces_of(shape, shard) for shard in shards],
        wanted=[engine_pieces(shape, grid.tensor, shard) for shard in grid.shards_of_model()],
        shapes=hf_shapes(shape, value_head=False),
        element_bytes=actor.dtype.itemsize,
        bucket_bytes=bucket_bytes,
        training_tensor=world.grid.tensor,
        rollout_tensor=grid.tensor,
    )
    return Reshard(plan, world.model_group, world.device, actor.dtype)


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

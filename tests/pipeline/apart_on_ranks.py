"""What the ranks do in the tests of the weight sync to engines apart; called by tests/ranks.py.

The ranks' world is not used: each takes its place in a job of trainers and engines, joined by a bridge as in a run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from pipeline.on_ranks import _Damage, _empty_engine
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_mc.models.hf_config import read_shape
from rlhf_mc.models.weight_layout import Shard, engine_pieces, hf_shapes, pieces_of
from rlhf_mc.parallel.exchange import NoPlaces, Reshard
from rlhf_mc.parallel.grids import RolloutGrid, TrainingGrid
from rlhf_mc.parallel.job import Job, join_bridge
from rlhf_mc.parallel.world import World
from rlhf_mc.pipeline.engine_weights import InPlaceWriter
from rlhf_mc.pipeline.nccl_wire import wire_over
from rlhf_mc.pipeline.weight_sync import plan_sync_apart


def _trained(path: str, grid: TrainingGrid) -> dict[str, Tensor]:
    """This rank's shard of the actor, by megatron's names, cut from the Hugging Face weights."""
    shape = read_shape(path, "actor.path")
    weights = AutoModelForCausalLM.from_pretrained(path).state_dict()
    pieces = pieces_of(shape, Shard.of(shape, grid, value_head=False))
    params = _empty_engine(pieces, hf_shapes(shape, value_head=False))
    for piece in pieces:
        rows = weights[piece.name].narrow(piece.dim, piece.whole_start, piece.length)
        params[piece.param].narrow(piece.dim, piece.start, piece.length).copy_(rows)
    return params


def sync(world: World, path: str, store: str, tensor: int, pipeline: int, engines: int, rollout: int, victim: int | None) -> dict[str, Any]:
    """One sync over the bridge; on `victim` one bit changes on the way. What this rank received, or its error."""
    job = Job(world.rank, world.size, world.rank, world.size, world.size - engines)
    bridge = join_bridge(job, dist.FileStore(store, world.size))
    shape, cpu = read_shape(path, "actor.path"), torch.device("cpu")
    trainer = TrainingGrid(job.num_trainers, 0 if job.has_engine_only else job.rank, tensor, pipeline)
    grid = RolloutGrid.apart(engines, job.rank - job.side.start if job.has_engine_only else 0, rollout)
    reshard = Reshard(plan_sync_apart(shape, trainer, grid, 4, bucket_bytes=6000), wire_over(bridge, cpu), cpu, torch.float32)
    answer: dict[str, Any] = {"sent": reshard.plan.sent, "received": reshard.plan.received, "tensor_rank": None, "error": ""}
    if not job.has_engine_only:
        return answer | {"error": _error_of(reshard, _trained(path, trainer), NoPlaces())}
    pieces = engine_pieces(shape, grid.tensor, grid.tensor_rank)
    engine = _empty_engine(pieces, hf_shapes(shape, value_head=False))
    writer = InPlaceWriter(engine, pieces)
    answer["error"] = _error_of(reshard, {}, _Damage(writer, reshard) if job.rank == victim else writer)
    return answer | {"tensor_rank": grid.tensor_rank, "engine": engine}


def _error_of(reshard: Reshard, params: dict[str, Tensor], places) -> str:
    try:
        reshard.run(params, places)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""

"""What the ranks do in the tests of the weight sync; called by tests/ranks.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mc.config import Settings, Trainer
from rlhf_mc.medusa import shape as medusa
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.hf_config import read_shape
from rlhf_mc.models.role import Role, build_role
from rlhf_mc.models.weight_layout import engine_pieces, hf_shapes
from rlhf_mc.parallel import exchange
from rlhf_mc.parallel.exchange import Reshard
from rlhf_mc.parallel.grids import RolloutGrid
from rlhf_mc.parallel.reshard import Piece, ReshardPlan, plan_reshard
from rlhf_mc.parallel.wire import GroupWire
from rlhf_mc.parallel.world import World
from rlhf_mc.pipeline.engine_weights import InPlaceWriter, ReloadWriter, TwoWriters
from rlhf_mc.pipeline.weight_sync import plan_weight_sync

PADDING_ROWS = 3


def _empty_engine(pieces: list[Piece], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Weights as an engine rank has them, of NaN, each with some rows of padding after its last piece."""
    sizes: dict[str, list[int]] = {}
    for piece in pieces:
        dims = list(shapes[piece.name])
        dims[piece.dim] = piece.start + piece.length + PADDING_ROWS
        sizes[piece.param] = [max(a, b) for a, b in zip(dims, sizes.get(piece.param, dims))]
    return {name: torch.full(dims, torch.nan) for name, dims in sizes.items()}


def _reshard(
    world: World, path: str, rollout: int, bucket_bytes: int, heads: HeadsShape | None = None
) -> tuple[Reshard, dict[str, Tensor], RolloutGrid]:
    settings = Settings(trainer=Trainer(dtype="fp32"))
    actor = build_role(Role.ACTOR, "language", path, settings, world)
    grid = RolloutGrid(world.grid, rollout)
    return plan_weight_sync(actor, grid, heads, bucket_bytes), actor.params(), grid


def sync(world: World, path: str, rollout: int, bucket_bytes: int) -> dict[str, Any]:
    """One sync in place and one through a reload; what both wrote, whole tensors filled in this rank's rows only.

    Each is done with all packed, then with all that can travel directly: `same` says whether that gives the same.
    """
    reshard, params, grid = _reshard(world, path, rollout, bucket_bytes)
    shape = read_shape(path, "actor.path")
    shapes, pieces = hf_shapes(shape, value_head=False), engine_pieces(shape, grid.tensor, grid.tensor_rank)
    engine = _empty_engine(pieces, shapes)
    in_place = InPlaceWriter(engine, pieces)
    in_place.start()
    reshard.run(params, in_place)
    in_place.finish()

    loaded: dict[str, Tensor] = {}
    calls: list[str] = []
    reload = ReloadWriter(
        pieces, shapes, shape.tied, torch.float32, lambda: calls.append("begin"), lambda pairs: loaded.update(pairs), lambda: calls.append("end")
    )
    reload.start()
    reshard.run(params, reload)
    reload.finish()

    packed, direct = dict(loaded), _empty_engine(pieces, shapes)
    with mock.patch.object(exchange, "_DIRECT_BYTES", 1):
        for writer in (InPlaceWriter(direct, pieces), reload):
            writer.start()
            reshard.run(params, writer)
            writer.finish()
    same = all(torch.equal(direct[piece.param], engine[piece.param]) for piece in pieces)
    parts = [(piece.name, piece.dim, piece.whole_start, piece.length) for piece in pieces]
    same &= all(torch.equal(loaded[name].narrow(*part), packed[name].narrow(*part)) for name, *part in parts)
    return {
        "same": same,
        "tensor_rank": grid.tensor_rank,
        "engine": engine,
        "loaded": loaded,
        "calls": calls,
        "received": reshard.plan.received[reshard.rank],
    }


def heads_weights(heads: HeadsShape) -> dict[str, Tensor]:
    """Whole tensors with no two elements alike."""
    sizes = [rows * columns for rows, columns in heads.tensors().values()]
    flat = torch.arange(sum(sizes), dtype=torch.float32).split(sizes)
    return {name: part.view(dims) for (name, dims), part in zip(heads.tensors().items(), flat, strict=True)}


# Columns of one weight, as (first, last + 1), that each of four ranks holds and wants.
HELD_COLUMNS = [(0, 6), (6, 8), (8, 12), None]
WANTED_COLUMNS = [(6, 8), (0, 3), (6, 12), (4, 9)]


def columns_plan(bucket_bytes: int = 1 << 20) -> ReshardPlan:
    """Columns that are all of what the source has, all of what the target has, both, and neither."""
    held = [[] if at is None else [Piece("held.weight", "w", 1, 0, at[0], at[1] - at[0])] for at in HELD_COLUMNS]
    wanted = [[Piece("wanted.weight", "w", 1, 0, start, end - start)] for start, end in WANTED_COLUMNS]
    return plan_reshard(held, wanted, {"w": (5, 12)}, 4, bucket_bytes, 1, 1)


def sync_columns(world: World, victim: int | None) -> tuple[Tensor, str]:
    """The columns that this rank has in the end, and its error, where one bit changed on rank `victim`."""
    plan, wire = columns_plan(), GroupWire(world.model_group)
    reshard = Reshard(plan, wire, world.device, torch.float32)
    whole, held, (start, end) = torch.arange(60.0).view(5, 12), HELD_COLUMNS[world.rank], WANTED_COLUMNS[world.rank]
    params = {"held.weight": whole[:, slice(*held)].clone()} if held else {}
    engine = {"wanted.weight": torch.full((5, end - start), torch.nan)}
    writer = InPlaceWriter(engine, [Piece("wanted.weight", "w", 1, 0, start, end - start)])
    with mock.patch.object(exchange, "_DIRECT_BYTES", 1):
        try:
            reshard.run(params, _Damage(writer, reshard) if world.rank == victim else writer)
        except exchange.ReshardError as error:
            return engine["wanted.weight"], str(error)
    return engine["wanted.weight"], ""


def sync_with_heads(world: World, path: str, rollout: int, shared_output: bool) -> dict[str, Any]:
    """One sync of an actor with draft heads; what this engine rank has of both afterwards."""
    shape = read_shape(path, "actor.path")
    heads = HeadsShape(2, 2, shared_output, shape.hidden, shape.vocab)
    reshard, params, grid = _reshard(world, path, rollout, 6000, heads)
    if world.grid.is_last_stage:
        whole = heads_weights(heads)
        place = world.grid
        held = medusa.trainer_pieces(heads, shape.padded_vocab(place.tensor), place.tensor, place.tensor_rank)
        params |= {piece.param: whole[piece.name].narrow(0, piece.whole_start, piece.length).clone() for piece in held}
    pieces, head_pieces = engine_pieces(shape, grid.tensor, grid.tensor_rank), medusa.engine_pieces(heads, grid.tensor, grid.tensor_rank)
    model, drafter = _empty_engine(pieces, hf_shapes(shape, value_head=False)), _empty_engine(head_pieces, heads.tensors())
    writer = TwoWriters(InPlaceWriter(model, pieces), InPlaceWriter(drafter, head_pieces), set(heads.tensors()))
    writer.start()
    reshard.run(params, writer)
    writer.finish()
    return {"tensor_rank": grid.tensor_rank, "heads": heads, "model": model, "drafter": drafter}


def sync_with_a_flipped_bit(world: World, path: str, rollout: int, victim: int) -> str:
    """The error on this rank of a sync during which one bit of the last row written on rank `victim` changes."""
    reshard, params, grid = _reshard(world, path, rollout, 1 << 16)
    shape = read_shape(path, "actor.path")
    pieces = engine_pieces(shape, grid.tensor, grid.tensor_rank)
    writer = InPlaceWriter(_empty_engine(pieces, hf_shapes(shape, value_head=False)), pieces)
    damage = _Damage(writer, reshard) if world.rank == victim else writer
    try:
        reshard.run(params, damage)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _Damage:
    """Places of which one loses a bit between the copy and the checksum: the read-back of the checksum itself flips it."""

    def __init__(self, writer: InPlaceWriter, reshard: Reshard) -> None:
        self._writer, self._complete = writer, reshard._complete
        self._due = True
        reshard._complete = self._complete_and_flip

    def _complete_and_flip(self, share, transfer, params) -> None:
        self._complete(share, transfer, params)
        if self._due and transfer.places:
            place = transfer.places[-1].view(torch.int32)
            place[(slice(-1, None),) * place.dim()].bitwise_xor_(1)
            self._due = False

    def places(self, blocks):
        return self._writer.places(blocks)

    def filled(self, blocks) -> None:
        self._writer.filled(blocks)


def count_collectives(world: World, path: str, rollout: int) -> tuple[int, int]:
    """Exchanges that one sync makes, and the buckets of its plan."""
    reshard, params, grid = _reshard(world, path, rollout, 1 << 16)
    messages = dist.batch_isend_irecv
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=messages) as calls:
        reshard.run(params, _Scratch())
    return calls.call_count, len(reshard.plan.buckets)


class _Scratch:
    """Places that nobody reads; may fail when asked for the n-th time."""

    def __init__(self, fails_at: int | None = None) -> None:
        self._asked, self._fails_at = 0, fails_at

    def places(self, blocks) -> list[Tensor]:
        self._asked += 1
        if self._asked == self._fails_at:
            raise MemoryError("no room on rank 1")
        return [torch.empty(block.dims) for block in blocks]

    def filled(self, blocks) -> None:
        pass


def sync_where_a_rank_fails(world: World, path: str, rollout: int) -> None:
    """A sync whose engine fails on rank 1 at the third bucket; the other ranks are then in the next exchange."""
    reshard, params, _ = _reshard(world, path, rollout, 6000)
    reshard.run(params, _Scratch(fails_at=3 if world.rank == 1 else None))

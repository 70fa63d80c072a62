"""Bytes of each part of a role on one rank, from the model's shape and the layout. Pure; no torch.

Follows the rules by which megatron-core 0.16 lays out its buffers and `arena.py` the rest, so that what is planned before
launch, what the host must hold, and what the ledger counts are the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.offload.layout import ALIGNMENT, packed_bytes, round_up
from rlhf_mc.offload.parts import Part

_FP32 = 4
#: megatron pads a bucket of the distributed optimizer to so many elements (256 bytes), and to the number of its ranks.
_BUCKET_MULTIPLE = 128


@dataclass(frozen=True)
class Place:
    """One rank's place in the training grid."""

    tensor: int = 1
    pipeline: int = 1
    stage: int = 0
    data: int = 1
    data_rank: int = 0


@dataclass(frozen=True)
class RoleKind:
    """What of a role decides its bytes. dtype_bytes: of its params. num_positions: rows of its rotary table."""

    shape: ModelShape
    value_head: bool
    trained: bool
    dtype_bytes: int
    num_positions: int
    distributed_optimizer: bool = True


@dataclass(frozen=True)
class Param:
    """own_bucket: megatron gives the embedding that two pipeline stages share a bucket of its own."""

    numel: int
    dtype_bytes: int
    own_bucket: bool = False


def params_of(kind: RoleKind, place: Place) -> list[Param]:
    """The params of one rank's shard, in the order of the module."""
    shape, t = kind.shape, place.tensor
    first, last = place.stage == 0, place.stage == place.pipeline - 1
    shared = shape.tied and not kind.value_head and place.pipeline > 1
    vocabulary = shape.padded_vocab(t) // t * shape.hidden
    params = [Param(vocabulary, kind.dtype_bytes, shared)] if first else []
    for _ in range(shape.num_layers // place.pipeline):
        params += [Param(numel, kind.dtype_bytes) for numel in _layer_numels(shape, t)]
    if last:
        params.append(Param(shape.hidden, kind.dtype_bytes))
        if kind.value_head:
            params.append(Param(shape.hidden, _FP32))
        elif not shape.tied or shared:
            params.append(Param(vocabulary, kind.dtype_bytes, shared))
    return params


def _layer_numels(shape: ModelShape, tensor: int) -> Iterator[int]:
    queries = shape.num_heads * shape.head_dim // tensor
    qkv = queries + 2 * shape.num_kv_heads * shape.head_dim // tensor
    yield shape.hidden  # input norm
    yield shape.hidden * queries
    yield qkv * shape.hidden
    if shape.qkv_bias:
        yield qkv
    if shape.qk_norm:
        yield from (shape.head_dim, shape.head_dim)
    yield shape.hidden  # norm before the MLP
    yield 2 * shape.ffn // tensor * shape.hidden
    yield shape.hidden * shape.ffn // tensor


@dataclass(frozen=True)
class _Buffer:
    """A buffer of megatron's: `numel` elements with padding, of which this rank steps `stepped` (one number a param)."""

    numel: int
    stepped: tuple[int, ...]


def _distributed_buffer(params: Iterable[Param], place: Place) -> _Buffer:
    """Params from the last to the first, each at a multiple of ALIGNMENT; each bucket cut evenly over the data-parallel ranks."""
    multiple = math.lcm(place.data, _BUCKET_MULTIPLE)
    buckets: list[list[tuple[int, int]]] = [[]]
    start = bucket_start = 0
    bounds: list[tuple[int, int]] = []

    def close() -> None:
        nonlocal start, bucket_start
        end = round_up(start, multiple)
        bounds.append((bucket_start, end))
        buckets.append([])
        start = bucket_start = end

    for param in reversed(list(params)):
        start = round_up(start, ALIGNMENT)
        if param.own_bucket and buckets[-1]:
            close()
        buckets[-1].append((start, start + param.numel))
        start += param.numel
        if param.own_bucket:
            close()
    if buckets[-1]:
        close()
    stepped = []
    for (low, high), spans in zip(bounds, buckets):
        share = (high - low) // place.data
        mine = low + place.data_rank * share, low + (place.data_rank + 1) * share
        stepped += [n for a, b in spans if (n := min(b, mine[1]) - max(a, mine[0])) > 0]
    return _Buffer(bounds[-1][1], tuple(stepped))


def part_bytes(kind: RoleKind, place: Place) -> dict[Part, int]:
    """Bytes of every part of a role on the rank at `place`, paddings included."""
    by_dtype: dict[int, list[Param]] = {}
    for param in params_of(kind, place):
        by_dtype.setdefault(param.dtype_bytes, []).append(param)
    table = packed_bytes([kind.num_positions * kind.shape.head_dim] * 2, _FP32)
    whole = sum(packed_bytes([p.numel for p in params], size) for size, params in by_dtype.items())
    if not kind.trained:
        return {Part.PARAMS: whole + table, Part.GRADS: 0, Part.MAIN_PARAMS: 0, Part.OPTIMIZER: 0}
    if kind.distributed_optimizer:
        buffers = {size: _distributed_buffer(params, place) for size, params in by_dtype.items()}
        whole = sum(size * buffer.numel for size, buffer in buffers.items())
    else:
        numels = {size: tuple(p.numel for p in params) for size, params in by_dtype.items()}
        buffers = {size: _Buffer(sum(n), n) for size, n in numels.items()}
    stepped = [n for buffer in buffers.values() for n in buffer.stepped]
    return {
        Part.PARAMS: whole + table,
        Part.GRADS: sum(_FP32 * buffer.numel for buffer in buffers.values()),
        Part.MAIN_PARAMS: sum(packed_bytes(buffer.stepped, _FP32) for size, buffer in buffers.items() if size != _FP32),
        Part.OPTIMIZER: 2 * packed_bytes(stepped, _FP32) + packed_bytes([1] * len(stepped), _FP32, alignment=1),
    }

"""Bytes of each part of a role on one rank, from the shape of the model, or of its draft heads, and the layout. Pure; no torch.

Follows the rules by which megatron-core 0.16 lays out its buffers and `arena.py` the rest, so that what is planned before
launch, what the host must hold, and what the ledger counts are the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.offload.layout import ALIGNMENT, packed_bytes, round_up
from rlhf_mc.offload.minimum import RoleBytes
from rlhf_mc.offload.parts import TRAINING, Part
from rlhf_mc.parallel.grids import TrainingGrid

_FP32 = 4
#: megatron pads a bucket of the distributed optimizer to so many elements (256 bytes), and to the number of its ranks.
_BUCKET_MULTIPLE = 128


@dataclass(frozen=True)
class Place:
    """One rank's place in the training grid. copies: of its shard, over data-parallel and context ranks.  virtual: chunks of its layers."""

    tensor: int = 1
    pipeline: int = 1
    stage: int = 0
    copies: int = 1
    copy_rank: int = 0
    virtual: int = 1

    @staticmethod
    def of(grid: TrainingGrid) -> Place:
        """This rank's."""
        return Place(grid.tensor, grid.pipeline, grid.stage, grid.copies, grid.copy_rank, grid.virtual)

    @property
    def is_last_stage(self) -> bool:
        """Whether it holds what comes after the layers."""
        return self.stage == self.pipeline - 1


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
class HeadsKind:
    """What of the draft heads decides their bytes. model: the shape of the actor.  dtype_bytes: of their params."""

    shape: HeadsShape
    model: ModelShape
    trained: bool
    dtype_bytes: int
    distributed_optimizer: bool = True


@dataclass(frozen=True)
class Param:
    """own_bucket: megatron gives the embedding that two pipeline stages share a bucket of its own."""

    numel: int
    dtype_bytes: int
    own_bucket: bool = False


def params_of(kind: RoleKind, place: Place) -> list[list[Param]]:
    """The params of one rank's shard, chunk by chunk, in the order of the module."""
    shape, t = kind.shape, place.tensor
    shared = shape.tied and not kind.value_head and place.pipeline > 1
    vocabulary = shape.padded_vocab(t) // t * shape.hidden
    layer = [Param(numel, kind.dtype_bytes) for numel in _layer_numels(shape, t)]
    chunks = [layer * (shape.num_layers // (place.pipeline * place.virtual)) for _ in range(place.virtual)]
    if place.stage == 0:
        chunks[0].insert(0, Param(vocabulary, kind.dtype_bytes, shared))
    if place.is_last_stage:
        chunks[-1].append(Param(shape.hidden, kind.dtype_bytes))
        if kind.value_head:
            chunks[-1].append(Param(shape.hidden, _FP32))
        elif not shape.tied or shared:
            chunks[-1].append(Param(vocabulary, kind.dtype_bytes, shared))
    return chunks


def heads_params_of(kind: HeadsKind, place: Place) -> list[Param]:
    """The params of one rank's shard of the draft heads, in the order of the module; none before the last pipeline stage."""
    if not place.is_last_stage:
        return []
    heads, t = kind.shape, place.tensor
    blocks = [heads.hidden // t * heads.hidden for _ in heads.block_names]
    outputs = [kind.model.padded_vocab(t) // t * heads.hidden for _ in heads.output_names]
    return [Param(numel, kind.dtype_bytes) for numel in blocks + outputs]


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
    """Buffers of megatron's of one precision: `numel` elements with padding, of which this rank steps `stepped` (one number a param)."""

    numel: int
    stepped: tuple[int, ...]


def _distributed_buffer(params: Iterable[Param], place: Place) -> _Buffer:
    """Params from the last to the first, each at a multiple of ALIGNMENT; each bucket cut evenly over the copies of the shard."""
    multiple = math.lcm(place.copies, _BUCKET_MULTIPLE)
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
        share = (high - low) // place.copies
        mine = low + place.copy_rank * share, low + (place.copy_rank + 1) * share
        stepped += [n for a, b in spans if (n := min(b, mine[1]) - max(a, mine[0])) > 0]
    return _Buffer(bounds[-1][1], tuple(stepped))


def _distributed_buffers(chunks: Sequence[Sequence[Param]], dtype_bytes: int, place: Place) -> _Buffer:
    """The buffers of one precision of all chunks together."""
    of_precision = ([param for param in chunk if param.dtype_bytes == dtype_bytes] for chunk in chunks)
    buffers = [_distributed_buffer(params, place) for params in of_precision if params]
    return _Buffer(sum(buffer.numel for buffer in buffers), tuple(n for buffer in buffers for n in buffer.stepped))


def role_bytes(kind: RoleKind, place: Place) -> RoleBytes:
    """Bytes of every part of a role on the rank at `place`, paddings included."""
    table = [kind.num_positions * kind.shape.head_dim] * 2
    return _bytes_of(params_of(kind, place), table, kind, place)


def heads_bytes(kind: HeadsKind, place: Place) -> RoleBytes:
    """Bytes of every part of the draft heads on the rank at `place`, paddings included."""
    return _bytes_of([heads_params_of(kind, place)], [], kind, place)


def _bytes_of(chunks: Sequence[Sequence[Param]], table: list[int], kind: RoleKind | HeadsKind, place: Place) -> RoleBytes:
    """Of params by chunk; each chunk has buffers of its own. `table`: numels of the fp32 tensors beside them, which nothing trains."""
    by_dtype: dict[int, list[int]] = {}
    for param in chain(*chunks):
        by_dtype.setdefault(param.dtype_bytes, []).append(param.numel)
    if not kind.trained:
        by_dtype.setdefault(_FP32, []).extend(table)
        return RoleBytes(dict.fromkeys(TRAINING, 0) | {Part.PARAMS: sum(_packed(n, size, place) for size, n in by_dtype.items())})
    if kind.distributed_optimizer:
        buffers = {size: _distributed_buffers(chunks, size, place) for size in by_dtype}
        params_bytes = {size: size * buffer.numel for size, buffer in buffers.items()}
        other = _packed(table, _FP32, place)
    else:
        buffers = {size: _Buffer(sum(numels), tuple(numels)) for size, numels in by_dtype.items()}
        params_bytes = {size: _packed(numels, size, place) for size, numels in by_dtype.items() if size != _FP32}
        other = _packed(by_dtype.get(_FP32, []) + table, _FP32, place)
    derived = sum(num_bytes for size, num_bytes in params_bytes.items() if size != _FP32)
    main = [n for size, buffer in buffers.items() if size != _FP32 for n in buffer.stepped]
    stepped = [n for buffer in buffers.values() for n in buffer.stepped]
    parts = {
        Part.PARAMS: sum(params_bytes.values()) + other,
        Part.GRADS: sum(_FP32 * buffer.numel for buffer in buffers.values()),
        Part.MAIN_PARAMS: packed_bytes(main, _FP32),
        Part.OPTIMIZER: 2 * packed_bytes(stepped, _FP32) + packed_bytes([1] * len(stepped), _FP32, alignment=1),
    }
    return RoleBytes(parts, derived)


def _packed(numels: list[int], element_bytes: int, place: Place) -> int:
    return packed_bytes(numels, element_bytes, multiple=place.copies)

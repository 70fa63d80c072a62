"""From the trainer's shards to the engine's by the fewest bytes: who hands which block of which weight to whom. Pure; no torch.

Both sides describe their shards in the same coordinates, rows or columns of whole tensors (`Piece`). What a rank wants and
holds itself stays where it is; every other block has one sender. The plan is made once and run at every sync by
exchange.py. It is the same on all ranks of the group that shares one copy of the model, whose ranks are named by position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from itertools import groupby, zip_longest
from math import ceil, prod
from typing import NamedTuple

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Piece:
    """`length` rows (dim 0) or columns (dim 1) of the whole tensor `name` from `whole_start`, held in `param` from `start`.

    owner: whether this copy is the one to export (the second copy of tied embeddings is not).
    """

    param: str
    name: str
    dim: int
    start: int
    whole_start: int
    length: int
    owner: bool = True

    @property
    def whole_end(self) -> int:
        """Row or column of the whole tensor after the last."""
        return self.whole_start + self.length

    def numel(self, dims: Sequence[int]) -> int:
        """Its elements, of a whole tensor with the shape `dims`."""
        return prod(dims) // dims[self.dim] * self.length


class Block(NamedTuple):  # a plan has many thousands: a dataclass takes three times as long to make
    """`length` rows (dim 0) or columns (dim 1) of `name`, from `whole_start`, that rank `source` hands to rank `target`.

    They lie in the source's `source_param` from `source_start`, and in the target's `target_param` from `target_start`.
    dims: the block's shape.  in_one_stretch: whether it lies so on one side at least: rows do, and columns that are all
    of what the source or the target has of `name`.
    """

    name: str
    dim: int
    whole_start: int
    length: int
    dims: tuple[int, ...]
    source: int
    source_param: str
    source_start: int
    target: int
    target_param: str
    target_start: int
    in_one_stretch: bool

    @property
    def is_local(self) -> bool:
        """Whether the target holds it already."""
        return self.source == self.target

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.dims)

    def rows(self, start: int, length: int) -> Block:
        """The part of it that begins `start` rows (or columns) further."""
        dims = tuple(length if d == self.dim else n for d, n in enumerate(self.dims))
        return self._replace(
            dims=dims,
            length=length,
            whole_start=self.whole_start + start,
            source_start=self.source_start + start,
            target_start=self.target_start + start,
            in_one_stretch=self.dim == 0,
        )


@dataclass(frozen=True)
class Share:
    """One rank's part in a bucket: blocks to copy, to send and to receive, the latter two in the same order on both ends."""

    local: tuple[Block, ...]
    sends: tuple[Block, ...]
    receives: tuple[Block, ...]

    @property
    def wanted(self) -> tuple[Block, ...]:
        """All blocks that come to lie on this rank."""
        return self.local + self.receives


@dataclass(frozen=True)
class Bucket:
    """What travels together: of each of these blocks, cut along its rows into `num_parts`, part number `part`.

    They are cut when they are asked for, so that a rank cuts its own only: in a large module that is a small part of all.
    """

    uncut: tuple[Block, ...]
    part: int = 0
    num_parts: int = 1

    def __iter__(self) -> Iterator[Block]:
        return self._cut(self.uncut)

    def share(self, rank: int) -> Share:
        """What is `rank`'s business."""
        mine = tuple(self._cut(self.of_rank(rank)))
        return Share(
            local=tuple(block for block in mine if block.is_local),
            sends=tuple(block for block in mine if block.target != rank),
            receives=tuple(block for block in mine if block.source != rank),
        )

    def of_rank(self, rank: int) -> tuple[Block, ...]:
        """The uncut blocks that are `rank`'s business."""
        return tuple(block for block in self.uncut if block.source == rank or block.target == rank)

    def lengths(self, uncut: Iterable[int]) -> set[int]:
        """What lengths are cut to; without those of which nothing is in this part."""
        return {end - start for start, end in map(self._bounds, uncut) if end > start}

    def _bounds(self, length: int) -> tuple[int, int]:
        return length * self.part // self.num_parts, length * (self.part + 1) // self.num_parts

    def _cut(self, blocks: Iterable[Block]) -> Iterator[Block]:
        if self.num_parts == 1:
            yield from blocks
            return
        for block in blocks:
            start, end = self._bounds(block.length)
            if end > start:
                yield block.rows(start, end - start)


@dataclass(frozen=True)
class ReshardPlan:
    """The blocks of each bucket, in the order in which they lie in a message; and what that costs.

    received, sent: bytes by rank, over the network, at each sync.  rollout_tensor: ranks of one engine replica.
    model_bytes: the whole model, each weight once.  num_ranks: those that take part.  apart: those that want pieces hold none.
    """

    buckets: tuple[Bucket, ...]
    num_ranks: int
    rollout_tensor: int
    training_tensor: int
    model_bytes: int
    received: tuple[int, ...]
    sent: tuple[int, ...]
    apart: bool

    def shares(self, rank: int) -> Iterator[Share]:
        """One rank's part in each bucket."""
        for parts in self._modules():
            mine = parts[0].of_rank(rank)
            yield from (replace(part, uncut=mine).share(rank) for part in parts)

    def row_numels(self) -> set[int]:
        """Elements that lie side by side in a row, of all blocks."""
        found: set[int] = set()
        for parts in self._modules():
            columns = {block.length for block in parts[0].uncut if block.dim == len(block.dims) - 1}
            found |= {block.dims[-1] for block in parts[0].uncut if block.dim < len(block.dims) - 1}
            found |= set().union(*(part.lengths(columns) for part in parts))
        return found

    def _modules(self) -> Iterator[list[Bucket]]:
        """The buckets that are parts of the same blocks, together: what these blocks have in common is looked for once."""
        return (list(parts) for _, parts in groupby(self.buckets, key=lambda bucket: id(bucket.uncut)))

    @property
    def bound(self) -> float:
        """The bound on the bytes that a rank receives. Apart, that is its whole shard, 1 / tg of the model. On the ranks of one
        copy of the trained model it is HybridFlow's (arXiv:2409.19256, table 2): (tp - tg) / (tg tp) of the model.
        """
        if self.apart:
            return self.model_bytes / self.rollout_tensor
        return self.model_bytes * (self.num_ranks - self.rollout_tensor) / (self.rollout_tensor * self.num_ranks)

    @property
    def excess(self) -> float:
        """Bytes that the busiest receiver gets above the bound; negative where it gets less (tied embeddings)."""
        return max(self.received) - self.bound

    def explanation(self) -> str:
        """One line: bytes received, the bound, and where they differ by more than 2 % of a shard, why."""
        shard = self.model_bytes / self.rollout_tensor
        why = ", its whole shard, as an engine rank holds nothing of the trainer's" if self.apart else ""
        line = f"{_mib(max(self.received))} received by a rank at most, bound {_mib(self.bound)}{why}"
        if self.excess <= 0.02 * shard:
            return line
        if self.rollout_tensor > self.training_tensor and not self.apart:
            return (
                f"{line}; {_mib(self.excess)} more, since rollout TP {self.rollout_tensor} exceeds training TP "
                f"{self.training_tensor}: a rank's rollout shard has rows of every layer, its training shard none of the other "
                "stages', and vLLM has no pipeline here to keep layers apart"
            )
        return (
            f"{line}; {_mib(self.excess)} more, in weights that the split leaves whole or uneven (norms, draft heads, the stages' "
            "embeddings, a vocabulary that the ranks do not share evenly): they do not shrink with the number of ranks"
        )


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def plan_reshard(
    held: Sequence[Sequence[Piece]],
    wanted: Sequence[Sequence[Piece]],
    shapes: Shapes,
    element_bytes: int,
    bucket_bytes: int,
    training_tensor: int,
    rollout_tensor: int,
) -> ReshardPlan:
    """The plan by which each rank gets the pieces that it wants from those that the ranks hold.

    held, wanted: pieces by rank. Sender of a block is the target itself where it holds it, else, of those who do, the one
    that has sent least. Buckets follow the checkpoint's order within each sender, the senders' weights by turns, so that
    all pipeline stages send at once; weights that the engine keeps in one module share a bucket, unless the module alone
    is larger. In no bucket does a rank send or receive more than `bucket_bytes` (a single row may exceed it).
    Raises ValueError for a piece that nobody holds.
    """
    holders = _holders(held)
    of_rank = {rank: holder for holder in holders for rank in holder.ranks}
    of_name: dict[str, list[_Holder]] = defaultdict(list)
    for holder in holders:
        for name in holder.pieces:
            of_name[name].append(holder)
    sent, received = [0] * len(held), [0] * len(held)
    modules: dict[str, list[Block]] = defaultdict(list)
    for target, pieces in enumerate(wanted):
        for piece in pieces:
            own = of_rank[target].pieces.get(piece.name, [])
            module = modules[piece.param.rpartition(".")[0]]
            for block, holder in _blocks(piece, target, own, of_name[piece.name], shapes[piece.name]):
                module.append(block)
                if holder is not None:
                    num_bytes = block.numel * element_bytes
                    holder.charge(num_bytes)
                    sent[block.source] += num_bytes
                    received[block.target] += num_bytes
    return ReshardPlan(
        buckets=tuple(_buckets(_by_turns(modules), element_bytes, bucket_bytes)),
        num_ranks=len(held),
        rollout_tensor=rollout_tensor,
        training_tensor=training_tensor,
        model_bytes=element_bytes * sum(prod(dims) for dims in shapes.values()),
        received=tuple(received),
        sent=tuple(sent),
        apart=not any(has and wants for has, wants in zip(held, wanted)),
    )


class _Holder:
    """Ranks that hold the same. pieces: by tensor, in order."""

    def __init__(self, ranks: list[int], pieces: Sequence[Piece]) -> None:
        self.ranks = ranks
        self.pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in sorted(pieces, key=lambda piece: piece.whole_start):
            self.pieces[piece.name].append(piece)
        self._turns = [(0, rank) for rank in ranks]

    @property
    def turn(self) -> tuple[int, int]:
        """Bytes that it has sent, and the rank that has sent least."""
        return self._turns[0]

    def charge(self, num_bytes: int) -> None:
        """To the rank whose turn it is."""
        sent, rank = self._turns[0]
        heapreplace(self._turns, (sent + num_bytes, rank))


def _holders(held: Sequence[Sequence[Piece]]) -> list[_Holder]:
    """Ranks whose pieces are one and the same list make one holder: of a thousand copies, only the one whose turn it is is looked at."""
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, pieces in enumerate(held):
        ranks[id(pieces)].append(rank)
    return [_Holder(same, held[same[0]]) for same in ranks.values()]


def _covering(pieces: list[Piece], at: int) -> Piece | None:
    """The piece that has row `at`."""
    if len(pieces) == 1:  # most tensors of most ranks
        return pieces[0] if pieces[0].whole_start <= at < pieces[0].whole_end else None
    place = bisect_right(pieces, at, key=lambda piece: piece.whole_start) - 1
    return pieces[place] if place >= 0 and at < pieces[place].whole_end else None


def _blocks(
    wanted: Piece, target: int, own: list[Piece], holders: list[_Holder], whole: tuple[int, ...]
) -> Iterator[tuple[Block, _Holder | None]]:
    """`wanted`, cut where its sender changes, each block with who sends it (None: the target has it).

    Foreign rows end where own ones begin. The sender must be charged with a block before the next one is asked for.
    """
    at = wanted.whole_start
    while at < wanted.whole_end:
        end, source, piece, holder = wanted.whole_end, target, _covering(own, at), None
        if piece is None:
            found = [(*one.turn, one, p) for one in holders if (p := _covering(one.pieces[wanted.name], at)) is not None]
            if not found:
                raise ValueError(f"row {at} of {wanted.name} is held by no rank")
            _, source, holder, piece = min(found, key=lambda candidate: candidate[:2])
            next_own = bisect_right(own, at, key=lambda p: p.whole_start)
            end = min(end, own[next_own].whole_start) if next_own < len(own) else end
        end = min(end, piece.whole_end)
        block = Block(
            name=wanted.name,
            dim=wanted.dim,
            whole_start=at,
            length=end - at,
            dims=(*whole[: wanted.dim], end - at, *whole[wanted.dim + 1 :]),
            source=source,
            source_param=piece.param,
            source_start=piece.start + at - piece.whole_start,
            target=target,
            target_param=wanted.param,
            target_start=wanted.start + at - wanted.whole_start,
            in_one_stretch=wanted.dim == 0 or end - at in (piece.length, wanted.length),
        )
        yield block, holder
        at = end


def _by_turns(modules: dict[str, list[Block]]) -> list[list[Block]]:
    """The modules' blocks, one module of each first sender after the other."""
    by_sender: dict[int, list[list[Block]]] = defaultdict(list)
    for blocks in modules.values():
        by_sender[min(block.source for block in blocks)].append(blocks)
    rounds = zip_longest(*by_sender.values())
    return [blocks for one_round in rounds for blocks in one_round if blocks is not None]


def _loads(blocks: Iterable[Block]) -> Counter[tuple[str, int]]:
    """Elements that each rank sends and receives, by ("sends" or "receives", rank)."""
    loads: Counter[tuple[str, int]] = Counter()
    for block in blocks:
        if not block.is_local:
            loads["sends", block.source] += block.numel
            loads["receives", block.target] += block.numel
    return loads


def _buckets(modules: list[list[Block]], element_bytes: int, bucket_bytes: int) -> Iterator[Bucket]:
    bucket: list[Block] = []
    filled: Counter[tuple[str, int]] = Counter()
    for blocks in modules:
        loads = _loads(blocks)
        if bucket and any((filled[end] + load) * element_bytes > bucket_bytes for end, load in loads.items()):
            yield Bucket(tuple(bucket))
            bucket, filled = [], Counter()
        num_parts = ceil(max(loads.values(), default=0) * element_bytes / bucket_bytes)
        if num_parts > 1:
            uncut = tuple(blocks)
            yield from (Bucket(uncut, part, num_parts) for part in range(num_parts))
        else:
            bucket += blocks
            filled += loads
    if bucket:
        yield Bucket(tuple(bucket))

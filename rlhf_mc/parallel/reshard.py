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
from itertools import zip_longest
from math import ceil, prod

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


@dataclass(frozen=True)
class Block:
    """`length` rows (dim 0) or columns (dim 1) of `name`, from `whole_start`, that rank `source` hands to rank `target`.

    They lie in the source's `source_param` from `source_start`, and in the target's `target_param` from `target_start`.
    dims: the block's shape.
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
        return replace(
            self,
            dims=dims,
            length=length,
            whole_start=self.whole_start + start,
            source_start=self.source_start + start,
            target_start=self.target_start + start,
        )


@dataclass(frozen=True)
class ReshardPlan:
    """The blocks of each bucket, in the order in which they lie in a message; and what that costs.

    received, sent: bytes by rank, over the network, at each sync.  rollout_tensor: ranks of one engine replica.
    model_bytes: the whole model, each weight once.  num_ranks: those that take part.  apart: those that want pieces hold none.
    """

    buckets: tuple[tuple[Block, ...], ...]
    num_ranks: int
    rollout_tensor: int
    training_tensor: int
    model_bytes: int
    received: tuple[int, ...]
    sent: tuple[int, ...]
    apart: bool

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
    sent, received = [0] * len(held), [0] * len(held)
    modules: dict[str, list[Block]] = defaultdict(list)
    for target, pieces in enumerate(wanted):
        for piece in pieces:
            for block in _blocks(piece, target, holders[piece.name], shapes[piece.name], sent):
                modules[piece.param.rpartition(".")[0]].append(block)
                if not block.is_local:
                    sent[block.source] += block.numel * element_bytes
                    received[block.target] += block.numel * element_bytes
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


Holders = dict[int, list[Piece]]


def _holders(held: Sequence[Sequence[Piece]]) -> dict[str, Holders]:
    """For each tensor, by rank, the pieces of it that the rank holds, in order."""
    holders: dict[str, Holders] = defaultdict(lambda: defaultdict(list))
    for rank, pieces in enumerate(held):
        for piece in pieces:
            holders[piece.name][rank].append(piece)
    for by_rank in holders.values():
        for pieces in by_rank.values():
            pieces.sort(key=lambda piece: piece.whole_start)
    return holders


def _covering(pieces: list[Piece], at: int) -> Piece | None:
    """The piece that has row `at`."""
    place = bisect_right(pieces, at, key=lambda piece: piece.whole_start) - 1
    return pieces[place] if place >= 0 and at < pieces[place].whole_end else None


def _blocks(wanted: Piece, target: int, holders: Holders, whole: tuple[int, ...], sent: Sequence[int]) -> Iterator[Block]:
    """`wanted`, cut where its sender changes. Foreign rows end where the target's own begin."""
    own = holders.get(target, [])
    at = wanted.whole_start
    while at < wanted.whole_end:
        end, source, piece = wanted.whole_end, target, _covering(own, at)
        if piece is None:
            found = [(sent[rank], rank, p) for rank, pieces in holders.items() if (p := _covering(pieces, at)) is not None]
            if not found:
                raise ValueError(f"row {at} of {wanted.name} is held by no rank")
            _, source, piece = min(found, key=lambda candidate: candidate[:2])
            next_own = bisect_right(own, at, key=lambda p: p.whole_start)
            end = min(end, own[next_own].whole_start) if next_own < len(own) else end
        end = min(end, piece.whole_end)
        yield Block(
            name=wanted.name,
            dim=wanted.dim,
            whole_start=at,
            length=end - at,
            dims=tuple(end - at if d == wanted.dim else n for d, n in enumerate(whole)),
            source=source,
            source_param=piece.param,
            source_start=piece.start + at - piece.whole_start,
            target=target,
            target_param=wanted.param,
            target_start=wanted.start + at - wanted.whole_start,
        )
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


def _buckets(modules: list[list[Block]], element_bytes: int, bucket_bytes: int) -> Iterator[tuple[Block, ...]]:
    bucket: list[Block] = []
    filled: Counter[tuple[str, int]] = Counter()
    for blocks in modules:
        loads = _loads(blocks)
        if bucket and any((filled[end] + load) * element_bytes > bucket_bytes for end, load in loads.items()):
            yield tuple(bucket)
            bucket, filled = [], Counter()
        num_parts = ceil(max(loads.values(), default=0) * element_bytes / bucket_bytes)
        if num_parts > 1:
            yield from _parts(blocks, num_parts)
        else:
            bucket += blocks
            filled += loads
    if bucket:
        yield tuple(bucket)


def _parts(blocks: list[Block], num_parts: int) -> Iterator[tuple[Block, ...]]:
    """The blocks of a module that is too large for one bucket, each cut along its rows into `num_parts`, part by part."""
    for part in range(num_parts):
        bounds = ((block, block.length * part // num_parts, block.length * (part + 1) // num_parts) for block in blocks)
        yield tuple(block.rows(start, end - start) for block, start, end in bounds if end > start)

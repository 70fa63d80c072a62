"""Runs a reshard plan: blocks travel from where they lie to where they shall lie, bucket by bucket, and are proven to be there.

Blocks that are in one stretch on both sides, as rows are, go straight from the trainer's weight into the engine's.
Where only one side has them so, as with columns that are all of what it holds, the other copies them once. Small
blocks, and columns that are part of more on both sides, are packed into one message for each pair of ranks. While one
bucket is copied on this rank, the next one travels. A checksum of every block where it lies at its source must equal
that of the block where it lies in the end; the sums are compared among all ranks that take part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from rlhf_mc.parallel.reshard import Block, ReshardPlan, Share
from rlhf_mc.parallel.wire import Message, Pending, Wire

# Measured over gloo: at 64 KiB a message costs as much as to pack and to unpack it, at 128 KiB as one of the two.
_DIRECT_BYTES = 1 << 17
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class ReshardError(RuntimeError):
    """Weights did not arrive as they were sent. The message names the rank and the weights."""


class Places(Protocol):
    """Where blocks go. It is asked for the blocks of a bucket before they come, and told when they are there."""

    def places(self, blocks: Sequence[Block]) -> Sequence[Tensor]:
        """For each block the memory that it shall fill, in its shape."""

    def filled(self, blocks: Sequence[Block]) -> None:
        """These blocks lie in their places."""


class NoPlaces:
    """Of a rank that only sends."""

    def places(self, blocks: Sequence[Block]) -> Sequence[Tensor]:
        """None: there are no blocks for this rank."""
        return []

    def filled(self, blocks: Sequence[Block]) -> None:
        """Nothing to do."""


@dataclass
class _Transfer:
    """A bucket on its way, packed messages ahead, so that they are unpacked while the others still travel.

    unpack: (place, the message's part that belongs there); late: the same of direct messages whose place is not contiguous.
    alive: messages that are still being sent.
    """

    places: list[Tensor]
    packed: list[Pending] = field(default_factory=list)
    direct: list[Pending] = field(default_factory=list)
    unpack: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    late: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    alive: list[Tensor] = field(default_factory=list)


class Reshard:
    """A plan on this rank of the wire, whose ranks are the plan's.

    Holds no memory between runs; in a run at most two buckets of copied messages, one that travels and one that is unpacked.
    """

    def __init__(self, plan: ReshardPlan, wire: Wire, device: torch.device, dtype: torch.dtype) -> None:
        self.plan, self.wire, self.device, self.dtype = plan, wire, device, dtype
        self.rank = wire.rank
        self._shares = list(plan.shares(self.rank))
        self._word = _common_word(plan, dtype.itemsize)

    @torch.no_grad()
    def run(self, params: Mapping[str, Tensor], engine: Places, prove: bool = True) -> None:
        """Collective over the wire. Each block that this rank wants comes to lie in its place in `engine`.

        params: this rank's shard, by the source's names.  prove: false leaves the checksums out, to measure what they cost.
        Raises ReshardError on every rank of the wire where what lies there is not what was sent.
        """
        sums = torch.zeros(len(self._shares), self.plan.num_ranks, dtype=torch.int64, device=self.device)
        ahead = self._start(self._shares[0], params, engine)
        for number, share in enumerate(self._shares):
            transfer, later = ahead, self._shares[number + 1 : number + 2]
            ahead = self._start(later[0], params, engine) if later else _Transfer([])
            self._complete(share, transfer, params)
            if prove:
                for block in share.sends + share.local:
                    sums[number, block.target] += self._checksum(_lying_in(params, block))
                for place in transfer.places:
                    sums[number, self.rank] -= self._checksum(place)
            engine.filled(share.wanted)
        self._compare(sums)

    def _start(self, share: Share, params: Mapping[str, Tensor], engine: Places) -> _Transfer:
        """Sets one bucket going."""
        transfer = _Transfer(list(engine.places(share.wanted)))
        incoming = list(zip(share.receives, transfer.places[len(share.local) :], strict=True))
        transfer.packed = self.wire.start(self._packed_receives(incoming, transfer), self._packed_sends(share, params, transfer))
        receives, sends = [], []
        for block, place in incoming:
            if self._is_direct(block):
                target = place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
                receives.append(Message(target, block.source))
                if target is not place:
                    transfer.late.append((place, target))
        for block in share.sends:
            if self._is_direct(block):
                transfer.alive.append(_lying_in(params, block).contiguous())
                sends.append(Message(transfer.alive[-1], block.target))
        transfer.direct = self.wire.start(receives, sends)
        return transfer

    def _packed_receives(self, incoming: Sequence[tuple[Block, Tensor]], transfer: _Transfer) -> list[Message]:
        """One message from each rank with all that does not travel by itself."""
        places: dict[int, list[tuple[Block, Tensor]]] = defaultdict(list)
        for block, place in incoming:
            if not self._is_direct(block):
                places[block.source].append((block, place))
        messages = []
        for peer, blocks in sorted(places.items()):
            message = self._message([block for block, _ in blocks])
            parts = _parts(message, [block for block, _ in blocks])
            transfer.unpack += [(place, part) for (_, place), part in zip(blocks, parts)]
            messages.append(Message(message, peer))
        return messages

    def _packed_sends(self, share: Share, params: Mapping[str, Tensor], transfer: _Transfer) -> list[Message]:
        """The same to each rank, filled."""
        by_peer: dict[int, list[Block]] = defaultdict(list)
        for block in share.sends:
            if not self._is_direct(block):
                by_peer[block.target].append(block)
        messages = []
        for peer, blocks in sorted(by_peer.items()):
            message = self._message(blocks)
            for block, part in zip(blocks, _parts(message, blocks)):
                part.copy_(_lying_in(params, block))
            transfer.alive.append(message)
            messages.append(Message(message, peer))
        return messages

    def _complete(self, share: Share, transfer: _Transfer, params: Mapping[str, Tensor]) -> None:
        """Copies what this rank holds itself, then takes the rest as it comes."""
        for block, place in zip(share.local, transfer.places):
            place.copy_(_lying_in(params, block))
        for works, arrived in ((transfer.packed, transfer.unpack), (transfer.direct, transfer.late)):
            for work in works:
                work.wait()
            for place, part in arrived:
                place.copy_(part)

    def _is_direct(self, block: Block) -> bool:
        return block.in_one_stretch and block.numel * self.dtype.itemsize >= _DIRECT_BYTES

    def _message(self, blocks: Sequence[Block]) -> Tensor:
        return torch.empty(sum(block.numel for block in blocks), dtype=self.dtype, device=self.device)

    def _checksum(self, values: Tensor) -> Tensor:
        """Sum of the block's bytes as integers, modulo 2**64: any change of a single word changes it."""
        word = _WORDS[self._word]
        try:
            words = values.view(word)
        except RuntimeError:  # its rows begin between two words
            words = values.contiguous().view(word)
        return words.sum(dtype=torch.int64)

    def _compare(self, sums: Tensor) -> None:
        """Collective over the wire."""
        self.wire.sum(sums)
        wrong = sums.nonzero().tolist()
        if wrong:
            bucket, rank = wrong[0]
            names = sorted({block.name for block in self.plan.buckets[bucket] if block.target == rank})
            raise ReshardError(
                f"weight sync: {len(wrong)} of {sums.numel()} checksums differ; first of bucket {bucket}, as written on rank {rank} of "
                f"{self.wire.name}: among {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}. The engine holds damaged "
                "weights; check the network and memory of that rank, and start again"
            )


def _common_word(plan: ReshardPlan, element_bytes: int) -> int:
    """Bytes of the widest integer of which every row of every block holds a whole number."""
    rows = {numel * element_bytes for numel in plan.row_numels()}
    return next(word for word in _WORDS if all(row % word == 0 for row in rows))


def _lying_in(params: Mapping[str, Tensor], block: Block) -> Tensor:
    return params[block.source_param].detach().narrow(block.dim, block.source_start, block.length)


def _parts(message: Tensor, blocks: Sequence[Block]) -> list[Tensor]:
    """Each block's part of the message, in the block's shape."""
    parts = message.split([block.numel for block in blocks])
    return [part.view(block.dims) for block, part in zip(blocks, parts, strict=True)]

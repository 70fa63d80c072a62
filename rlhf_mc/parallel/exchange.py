"""Runs a reshard plan: packs what others want, exchanges it bucket by bucket, hands each block to whoever writes it, and proves it.

While one bucket is written, the next one travels. A checksum of every block, taken where it lies at its source before it is
sent, must equal that of the same block where it lies after it was written; the sums are compared among all ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mc.parallel.reshard import Block, ReshardPlan

Blocks = Sequence[tuple[Block, Tensor]]
Write = Callable[[Blocks], Sequence[Tensor]]
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class ReshardError(RuntimeError):
    """Weights did not arrive as they were sent. The message names the rank and the weights."""


@dataclass(frozen=True)
class _Message:
    """This rank's part in one bucket. sends, receives: blocks in the order of the message.

    send_sizes, receive_sizes: elements to and from each rank.  is_exchanged: whether any two ranks exchange anything.
    """

    local: tuple[Block, ...]
    sends: tuple[Block, ...]
    receives: tuple[Block, ...]
    send_sizes: list[int]
    receive_sizes: list[int]
    is_exchanged: bool

    @staticmethod
    def of(bucket: Sequence[Block], rank: int, num_ranks: int) -> _Message:
        sends = sorted((b for b in bucket if b.source == rank and not b.is_local), key=lambda b: b.target)
        receives = sorted((b for b in bucket if b.target == rank and not b.is_local), key=lambda b: b.source)
        return _Message(
            local=tuple(b for b in bucket if b.is_local and b.target == rank),
            sends=tuple(sends),
            receives=tuple(receives),
            send_sizes=[sum(b.numel for b in sends if b.target == other) for other in range(num_ranks)],
            receive_sizes=[sum(b.numel for b in receives if b.source == other) for other in range(num_ranks)],
            is_exchanged=any(not b.is_local for b in bucket),
        )


class Reshard:
    """A plan on this rank of the group that shares one copy of the trained model.

    Holds no memory between runs. In a run: two messages out and two in, each of a bucket at most.
    """

    def __init__(self, plan: ReshardPlan, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        self.plan, self.group, self.device, self.dtype = plan, group, device, dtype
        self.rank = group.rank()
        self._messages = [_Message.of(bucket, self.rank, plan.num_ranks) for bucket in plan.buckets]
        self._word = _common_word(plan, dtype.itemsize)

    def run(self, params: Mapping[str, Tensor], write: Write, prove: bool = True) -> None:
        """Collective over the group. Each block that this rank wants goes through `write` once, bucket by bucket.

        params: this rank's shard, by the source's names.
        write: takes (block, values) pairs, of which the values are good until it returns, and returns where each of them lies
        then.  prove: false leaves the checksums out, to measure what they cost.  Raises ReshardError on every rank of the group where what lies there is not what was sent.
        """
        sums = torch.zeros(len(self._messages), self.plan.num_ranks, dtype=torch.int64, device=self.device)
        ahead = self._send(0, params, sums, prove)
        for bucket, message in enumerate(self._messages):
            work, received, _ = ahead
            ahead = self._send(bucket + 1, params, sums, prove)
            if work is not None:
                work.wait()
            blocks = [(block, _lying_in(params, block)) for block in message.local] + _unpacked(message.receives, received)
            for _, values in blocks[: len(message.local)] if prove else ():
                sums[bucket, self.rank] += self._checksum(values)
            written = write(blocks)
            for values in written if prove else ():
                sums[bucket, self.rank] -= self._checksum(values)
        self._compare(sums)

    def _send(self, bucket: int, params: Mapping[str, Tensor], sums: Tensor, prove: bool) -> tuple[dist.Work | None, Tensor, Tensor]:
        """Starts one bucket's exchange; nothing after the last. Returns what to wait for, and the two messages, to keep them alive."""
        if bucket == len(self._messages) or not self._messages[bucket].is_exchanged:
            nothing = torch.empty(0, dtype=self.dtype, device=self.device)
            return None, nothing, nothing
        message = self._messages[bucket]
        packed = torch.empty(sum(message.send_sizes), dtype=self.dtype, device=self.device)
        received = torch.empty(sum(message.receive_sizes), dtype=self.dtype, device=self.device)
        for block, slot in _unpacked(message.sends, packed):
            slot.copy_(_lying_in(params, block))
            if prove:
                sums[bucket, block.target] += self._checksum(slot)
        work = dist.all_to_all_single(
            received, packed, message.receive_sizes, message.send_sizes, group=self.group, async_op=True
        )
        return work, received, packed

    def _checksum(self, values: Tensor) -> Tensor:
        """Sum of the block's bytes as integers, modulo 2**64: any change of a single word changes it."""
        word = _WORDS[self._word]
        try:
            words = values.view(word)
        except RuntimeError:  # its rows begin between two words
            words = values.contiguous().view(word)
        return words.sum(dtype=torch.int64)

    def _compare(self, sums: Tensor) -> None:
        """Collective over the group."""
        dist.all_reduce(sums, group=self.group)
        wrong = sums.nonzero().tolist()
        if wrong:
            bucket, rank = wrong[0]
            names = sorted({block.name for block in self.plan.buckets[bucket] if block.target == rank})
            raise ReshardError(
                f"weight sync: {len(wrong)} of {sums.numel()} checksums differ; first of bucket {bucket}, as written on rank {rank} of "
                f"the model group: among {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}. The engine holds damaged "
                "weights; check the network and memory of that rank, and start again"
            )


def _common_word(plan: ReshardPlan, element_bytes: int) -> int:
    """Bytes of the widest integer of which every row of every block holds a whole number."""
    rows = {block.dims[-1] * element_bytes for bucket in plan.buckets for block in bucket}
    return next(word for word in _WORDS if all(row % word == 0 for row in rows))


def _lying_in(params: Mapping[str, Tensor], block: Block) -> Tensor:
    return params[block.source_param].detach().narrow(block.dim, block.source_start, block.length)


def _unpacked(blocks: Sequence[Block], message: Tensor) -> list[tuple[Block, Tensor]]:
    """Each block with its place in the message, in the block's shape."""
    places = message.split([block.numel for block in blocks]) if blocks else ()
    return [(block, place.view(block.dims)) for block, place in zip(blocks, places, strict=True)]

"""From a batch and a planned micro-batch to what a rank takes: packed tokens, positions, and the rows that are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlhf_mc.batch import SequenceBatch, gather_segments, offsets_of, ragged_arange
from rlhf_mc.parallel.attention import PackedSequences, pack_sequences
from rlhf_mc.parallel.context import ALONE, Context, cut_sequences
from rlhf_mc.parallel.microbatches import PlannedMicrobatch

Asked = Literal["predicted", "last"]


@dataclass(frozen=True)
class RotaryTable:
    """cos, sin: float32[positions, head_dim], on the device of the model."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class AskedRows:
    """What a micro-batch asks for on all context ranks together, N numbers; on the host.

    rows: int64[N], ascending, where among the packed tokens of all of these ranks.  The others: int64[N], as in PackedMicrobatch.
    """

    rows: Tensor
    targets: Tensor
    answer_numbers: Tensor
    slots: Tensor
    sequence_ids: Tensor


@dataclass(frozen=True)
class PackedMicrobatch:
    """What this rank has of one micro-batch, on the device. n numbers are asked of its model, one at each of `rows`.

    tokens: int64[T'], packed. The micro-batch was padded at the end, by a sequence of its own, to a multiple of the ranks that
    share its tokens, and then cut over its context ranks.
    sequences: for the attention.
    rows: int64[n], where the hidden states lie that answer: before each predicted token, or at each last token.
    targets: int64[n], the predicted tokens (for "last": the last tokens themselves, unused).
    answer_numbers: int64[n], 0 for the first answer of each sequence, 1 for its second, and so on.
    slots: int64[n] on the host, where the answers go in the whole batch: in the order of its predicted tokens, or of its sequences.
    sequence_ids: int64[n] on the host, which sequence of the batch each answer belongs to.
    asked: what all context ranks are asked, N numbers.  mine: int64[n] on the host, ascending, which of these are this rank's n.
    fill: the micro-batch repeats another's sequence and must weigh nothing.
    """

    tokens: Tensor
    sequences: PackedSequences
    rows: Tensor
    targets: Tensor
    answer_numbers: Tensor
    slots: Tensor
    sequence_ids: Tensor
    asked: AskedRows
    mine: Tensor
    fill: bool


@dataclass(frozen=True)
class PackedBatch:
    """A batch with what is computed from it once: where each sequence's answers start. Everything is on the host."""

    batch: SequenceBatch
    asked: Asked
    counts: Tensor
    slot_offsets: Tensor

    @staticmethod
    def of(batch: SequenceBatch, asked: Asked) -> PackedBatch:
        """`asked` predicted: a number for each token in loss_mask. last: a number for each sequence."""
        segment = torch.arange(len(batch)).repeat_interleave(batch.lengths)
        predicted = torch.zeros(len(batch), dtype=torch.int64).index_add_(0, segment, batch.loss_mask.long())
        counts = predicted if asked == "predicted" else torch.ones_like(batch.lengths)
        return PackedBatch(batch, asked, counts, offsets_of(counts))

    @property
    def num_answers(self) -> int:
        """How many numbers the whole batch asks for."""
        return int(self.slot_offsets[-1])

    def num_tokens(self, planned: PlannedMicrobatch, multiple: int) -> int:
        """Tokens of the micro-batch with the padding that makes them a multiple of the ranks that share them."""
        total = int(self.batch.lengths[list(planned.sequences)].sum())
        return total + -total % multiple

    def pack(
        self,
        planned: PlannedMicrobatch,
        multiple: int,
        table: RotaryTable,
        device: torch.device,
        context: Context = ALONE,
        ragged: bool = False,
    ) -> PackedMicrobatch:
        """A rank's part of the micro-batch on `device`, on every context rank equally long, a multiple of `multiple`.

        ragged: for the attention, see `pack_sequences`.
        """
        index = torch.tensor(planned.sequences)
        lengths = self.batch.lengths[index]
        tokens = gather_segments(self.batch.tokens, self.batch.lengths, index)
        asked = self._asked_of(index, tokens)
        padding = self.num_tokens(planned, multiple * context.size) - tokens.numel()
        if padding:
            tokens = torch.cat([tokens, tokens.new_zeros(padding)])
            lengths = torch.cat([lengths, lengths.new_tensor([padding])])
        cut = cut_sequences(lengths, context.size)
        mine, rows = cut.on_rank(asked.rows, context.rank)
        return PackedMicrobatch(
            tokens=tokens[cut.held[context.rank]].to(device),
            sequences=pack_sequences(cut, table.cos, table.sin, device, context, ragged),
            rows=rows.to(device),
            targets=asked.targets[mine].to(device),
            answer_numbers=asked.answer_numbers[mine].to(device),
            slots=asked.slots[mine],
            sequence_ids=asked.sequence_ids[mine],
            asked=asked,
            mine=mine,
            fill=planned.fill,
        )

    def _asked_of(self, index: Tensor, tokens: Tensor) -> AskedRows:
        """What is asked of the sequences `index`, whose tokens these are."""
        if self.asked == "predicted":
            wanted = gather_segments(self.batch.loss_mask, self.batch.lengths, index).nonzero().squeeze(1)
            rows = wanted - 1
        else:
            rows = wanted = self.batch.lengths[index].cumsum(0) - 1
        counts = self.counts[index]
        answer_numbers = ragged_arange(counts)
        return AskedRows(
            rows=rows,
            targets=tokens[wanted],
            answer_numbers=answer_numbers,
            slots=self.slot_offsets[:-1][index].repeat_interleave(counts) + answer_numbers,
            sequence_ids=index.repeat_interleave(counts),
        )

"""Sequences to train on as they are: supervised examples, preference pairs, pretraining text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from rlhf_mc.batch import SequenceBatch, gather_segments, ragged_arange
from rlhf_mc.data.encode import EncodedExchange, Encoder
from rlhf_mc.data.formats import exchange_of, pair_of, text_of
from rlhf_mc.data.order import Order
from rlhf_mc.data.report import keep_short
from rlhf_mc.data.rows import DataError, Row


@dataclass(frozen=True)
class _Sequences:
    """All sequences of a data set, flat. tokens: int32[T].  lengths, starts: int64[N], start of the predicted tokens."""

    tokens: Tensor
    lengths: Tensor
    starts: Tensor

    @staticmethod
    def of(sequences: Sequence[list[int]], starts: Sequence[int]) -> _Sequences:
        """The first token of a sequence has nothing before it to be predicted from: it is never a start."""
        return _Sequences(
            tokens=torch.tensor(list(chain.from_iterable(sequences)), dtype=torch.int32),
            lengths=torch.tensor([len(sequence) for sequence in sequences]),
            starts=torch.tensor([max(1, start) for start in starts]),
        )

    def take(self, chosen: Tensor) -> SequenceBatch:
        lengths = self.lengths[chosen]
        return SequenceBatch(
            tokens=gather_segments(self.tokens, self.lengths, chosen).long(),
            lengths=lengths,
            loss_mask=ragged_arange(lengths) >= self.starts[chosen].repeat_interleave(lengths),
        )


class _SequenceSource:
    """Batches by step number. An item is one sequence, or the `sequences_per_item` that stand together."""

    def __init__(self, sequences: _Sequences, sequences_per_item: int, batch_size: int, seed: int, shuffle: bool) -> None:
        self._sequences = sequences
        self._per_item = sequences_per_item
        self._batch_size = batch_size
        self._order = Order(sequences.lengths.numel() // sequences_per_item, seed, shuffle)

    def __len__(self) -> int:
        """Number of items."""
        return self._order.num_rows

    def num_steps(self, epochs: int) -> int:
        """Steps until every item was seen `epochs` times."""
        return self._order.num_batches(self._batch_size, epochs)

    def batch(self, step: int) -> SequenceBatch:
        """The `batch_size` items of step 0, 1, ...: a pure function of (seed, step)."""
        return self._take(self._order.rows(self._order.positions(step, self._batch_size)))

    def all(self) -> SequenceBatch:
        """Every item once, in file order, for evaluation."""
        return self._take(torch.arange(len(self)))

    def _take(self, items: Tensor) -> SequenceBatch:
        members = items[:, None] * self._per_item + torch.arange(self._per_item)
        return self._sequences.take(members.flatten())


class SupervisedExamples(_SequenceSource):
    """Prompts with their responses for SFT; the loss is on the response and its EOS.

    `report` says which examples were dropped as longer than `max_tokens`. Raises DataError.
    """

    def __init__(
        self, rows: Sequence[Row], encoder: Encoder, *, batch_size: int, max_tokens: int, seed: int, shuffle: bool
    ) -> None:
        encoded = encoder.exchanges([exchange_of(row) for row in rows])
        lengths = [_length(exchange) for exchange in encoded]
        kept, self.report = keep_short(lengths, [row.where for row in rows], "examples", "supervised.max_tokens", max_tokens)
        super().__init__(_sequences([encoded[i] for i in kept]), 1, batch_size, seed, shuffle)


class PreferencePairs(_SequenceSource):
    """Chosen and rejected responses for the reward model: a batch has 2B sequences, chosen at 2i, rejected at 2i + 1.

    loss_mask marks the responses, as in SFT; a reward model reads the last token, which is EOS. A pair is dropped, and
    named in `report`, if one of the two is longer than `max_tokens`. Raises DataError.
    """

    def __init__(
        self, rows: Sequence[Row], encoder: Encoder, *, batch_size: int, max_tokens: int, seed: int, shuffle: bool
    ) -> None:
        pairs = [pair_of(row) for row in rows]
        encoded = encoder.exchanges(list(chain.from_iterable(pairs)))
        lengths = [max(_length(c), _length(r)) for c, r in zip(encoded[::2], encoded[1::2], strict=True)]
        kept, self.report = keep_short(lengths, [row.where for row in rows], "pairs", "supervised.max_tokens", max_tokens)
        members = [encoded[2 * i + side] for i in kept for side in (0, 1)]
        super().__init__(_sequences(members), 2, batch_size, seed, shuffle)


class PretrainText(_SequenceSource):
    """Text for the ptx loss (InstructGPT, arXiv:2203.02155) or for plain language modelling; all tokens but the first train.

    A text ends with EOS. One that is longer than `max_tokens` is cut into pieces, and none of it is lost but a
    single token that may remain at the end; so nothing is dropped. Rows without `text` are read as supervised examples.
    """

    def __init__(
        self, rows: Sequence[Row], encoder: Encoder, *, batch_size: int, max_tokens: int, seed: int, shuffle: bool
    ) -> None:
        encoded = encoder.exchanges([text_of(row) for row in rows])
        pieces = [piece for exchange in encoded for piece in _pieces(exchange.prompt + exchange.response, max_tokens)]
        if not pieces:
            raise DataError(f"{rows[0].where}: no row from here on has a piece of 2 to {max_tokens} tokens to learn from")
        super().__init__(_Sequences.of(pieces, [1] * len(pieces)), 1, batch_size, seed, shuffle)


def _length(exchange: EncodedExchange) -> int:
    return len(exchange.prompt) + len(exchange.response)


def _sequences(exchanges: Sequence[EncodedExchange]) -> _Sequences:
    return _Sequences.of([e.prompt + e.response for e in exchanges], [len(e.prompt) for e in exchanges])


def _pieces(tokens: list[int], size: int) -> list[list[int]]:
    """Consecutive pieces of at most `size` tokens. One token alone predicts nothing, so it is no piece."""
    pieces = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    return [piece for piece in pieces if len(piece) > 1]

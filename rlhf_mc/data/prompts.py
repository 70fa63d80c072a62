"""The prompts of PPO: encoded once, and handed out by iteration number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_mc.batch import PromptBatch, gather_segments
from rlhf_mc.data.encode import Encoder
from rlhf_mc.data.formats import prompt_of
from rlhf_mc.data.order import Order
from rlhf_mc.data.report import keep_short
from rlhf_mc.data.rows import Row


class PromptSource:
    """Prompts of all rows that fit, in an order that depends on nothing but the seed; issues no collective.

    Construction reads, encodes and drops alike on every rank. `report` says what was dropped: a row whose prompt has more
    than `max_prompt_tokens` tokens. Raises DataError for a row without a prompt, or if none is left.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        encoder: Encoder,
        *,
        prompts_per_iteration: int,
        max_prompt_tokens: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        wheres = [row.where for row in rows]
        encoded = encoder.prompts([prompt_of(row) for row in rows], wheres)
        lengths = [len(ids) for ids in encoded]
        kept, self.report = keep_short(lengths, wheres, "prompts", "data.max_prompt_tokens", max_prompt_tokens)
        self._rows = [rows[i].fields for i in kept]
        self._tokens = torch.tensor([token for i in kept for token in encoded[i]], dtype=torch.int64)
        self._lengths = torch.tensor([len(encoded[i]) for i in kept])
        self._order = Order(len(kept), seed, shuffle)
        self._prompts_per_iteration = prompts_per_iteration

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, iteration: int) -> PromptBatch:
        """The prompts of iteration 0, 1, ...: B = prompts_per_iteration. Where they do not divide the number of
        prompts, an iteration takes the end of one epoch and the start of the next."""
        positions = self._order.positions(iteration, self._prompts_per_iteration)
        return self._take(self._order.rows(positions), positions % len(self))

    def all(self) -> PromptBatch:
        """Every prompt once, in file order, for evaluation."""
        everything = torch.arange(len(self))
        return self._take(everything, everything)

    def _take(self, chosen: Tensor, indices: Tensor) -> PromptBatch:
        return PromptBatch(
            tokens=gather_segments(self._tokens, self._lengths, chosen),
            lengths=self._lengths[chosen],
            rows=[self._rows[i] for i in chosen.tolist()],
            indices=indices,
        )

"""The records that pass between stages: PromptBatch -> RolloutBatch -> Experience.

Every rank holds the whole batch of an iteration in host memory; only the model work on it is split over ranks. What
crosses ranks is therefore numbers per token, never hidden states, and whatever is computed from a whole batch
(whitening, baselines, mini-batches) is the same on all ranks and independent of the layout.

Sequences are held flat: all tokens in one tensor, plus lengths. Masks come from lengths, never from token ids.

Shape legend, used in every docstring of the package:
    B  sequences      T  packed tokens (prompts and responses)    R  response tokens of all sequences, in order
    V  vocabulary     H  hidden size      K  Medusa heads         M  micro-batches
Sequence b is tokens[offsets[b] : offsets[b + 1]]: its prompt, then its response.

Whose number: `rollout_logprobs` are the engine's, `old_logprobs` megatron's before the update, `ref_logprobs` the
reference's; `scores` has one number a sequence, `rewards` one a response token, after the KL penalty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def offsets_of(lengths: Tensor) -> Tensor:
    """Start of each segment and the end of the last, int64[B + 1], from lengths int64[B]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def ragged_arange(lengths: Tensor) -> Tensor:
    """0..n-1 for each n of `lengths`, concatenated, int64[sum]."""
    total = int(lengths.sum())
    starts = offsets_of(lengths)[:-1]
    return torch.arange(total, device=lengths.device) - starts.repeat_interleave(lengths)


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum of each segment: values [sum of lengths] -> [B]. An empty segment sums to 0."""
    segment = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths)
    return values.new_zeros(lengths.numel()).index_add_(0, segment, values)


def gather_segments(values: Tensor, lengths: Tensor, indices: Tensor) -> Tensor:
    """The segments named by `indices`, in that order, concatenated. values [sum of lengths, ...]."""
    chosen = lengths[indices]
    starts = offsets_of(lengths)[:-1][indices]
    return values[starts.repeat_interleave(chosen) + ragged_arange(chosen)]


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of one iteration, in data order.

    tokens: int64[T] prompt token ids.  lengths: int64[B].
    rows: B dataset rows (dicts with at least what the reward functions need).
    indices: int64[B] position of each row in its epoch's order, for logs and replay.
    """

    tokens: Tensor
    lengths: Tensor
    rows: list[dict[str, Any]]
    indices: Tensor

    def __len__(self) -> int:
        return self.lengths.numel()

    def prompt(self, b: int) -> list[int]:
        """Token ids of prompt b."""
        start = int(self.lengths[:b].sum())
        return self.tokens[start : start + int(self.lengths[b])].tolist()


@dataclass(frozen=True)
class SequenceBatch:
    """Sequences to train on as they are: supervised examples, pretraining text, or preference pairs.

    tokens: int64[T].  lengths: int64[B].
    loss_mask: bool[T], true where the token is to be predicted; never at the first token of a sequence.
    Of preference pairs, sequence 2i is the chosen one and 2i + 1 the rejected one.
    """

    tokens: Tensor
    lengths: Tensor
    loss_mask: Tensor

    def __len__(self) -> int:
        return self.lengths.numel()


@dataclass(frozen=True)
class RolloutBatch:
    """Prompts with sampled responses, sample j of prompt i at b = i * samples_per_prompt + j.

    tokens: int64[T].  prompt_lengths, response_lengths: int64[B].
    rollout_logprobs: float32[R], the engine's log-probs of the sampled tokens at the sampling temperature.
    truncated: bool[B], the response hit max_tokens and did not finish.
    stop_reasons: B strings as the engine gave them ("stop", "length", or the stop string).
    groups: int64[B], index of the prompt; rows: B dataset rows.
    """

    tokens: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    rollout_logprobs: Tensor
    truncated: Tensor
    stop_reasons: list[str]
    groups: Tensor
    rows: list[dict[str, Any]]

    def __len__(self) -> int:
        return self.prompt_lengths.numel()

    @property
    def lengths(self) -> Tensor:
        """int64[B], prompt plus response."""
        return self.prompt_lengths + self.response_lengths

    @property
    def sequences(self) -> SequenceBatch:
        """The same sequences with their response tokens to be predicted: a number asked of a model for each is [R]."""
        return SequenceBatch(self.tokens, self.lengths, self.response_mask)

    @property
    def response_mask(self) -> Tensor:
        """bool[T], true at response tokens; masked values [T] come out in response order [R]."""
        return ragged_arange(self.lengths) >= self.prompt_lengths.repeat_interleave(self.lengths)

    @property
    def last_response_positions(self) -> Tensor:
        """int64[B], index in [R] of each sequence's last response token (-1 before the first for an empty response)."""
        return self.response_lengths.cumsum(0) - 1

    def prompt(self, b: int) -> list[int]:
        """Token ids of the prompt of sequence b."""
        start = int(self.lengths[:b].sum())
        return self.tokens[start : start + int(self.prompt_lengths[b])].tolist()

    def response(self, b: int) -> list[int]:
        """Token ids of the response of sequence b."""
        end = int(self.lengths[: b + 1].sum())
        return self.tokens[end - int(self.response_lengths[b]) : end].tolist()


@dataclass(frozen=True)
class Experience:
    """A rollout with all that the update needs. Every float tensor is float32.

    old_logprobs, ref_logprobs, values, rewards, advantages, returns: [R]; values are 0 where there is no critic.
    scores: [B], reward model and reward functions mixed, before KL.
    loss_mask: bool[R], false where a token must not train (masked truncated responses).
    reward_parts: name -> [B], each scorer's own number, paid or only measured.
    """

    rollout: RolloutBatch
    old_logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    scores: Tensor
    rewards: Tensor
    advantages: Tensor
    returns: Tensor
    loss_mask: Tensor
    reward_parts: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rollout)

    def select(self, indices: Tensor) -> TrainingSlice:
        """What one mini-batch trains on: the sequences `indices` (int64), in that order."""
        rollout = self.rollout

        def chosen(values: Tensor) -> Tensor:
            return gather_segments(values, rollout.response_lengths, indices)

        return TrainingSlice(
            sequences=SequenceBatch(
                tokens=gather_segments(rollout.tokens, rollout.lengths, indices),
                lengths=rollout.lengths[indices],
                loss_mask=gather_segments(rollout.response_mask, rollout.lengths, indices),
            ),
            old_logprobs=chosen(self.old_logprobs),
            ref_logprobs=chosen(self.ref_logprobs),
            values=chosen(self.values),
            advantages=chosen(self.advantages),
            returns=chosen(self.returns),
            loss_mask=chosen(self.loss_mask),
        )


@dataclass(frozen=True)
class TrainingSlice:
    """Some sequences of an Experience, as an optimizer step takes them. R is of these sequences only; all on the host.

    sequences: with the response tokens to be predicted.  The rest: [R], as in Experience.
    """

    sequences: SequenceBatch
    old_logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    loss_mask: Tensor

    @property
    def num_trained_tokens(self) -> int:
        """Response tokens that count: the one denominator of the loss, the same on every rank."""
        return int(self.loss_mask.sum())

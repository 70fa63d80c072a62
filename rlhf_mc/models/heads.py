"""What is read off the last hidden states: log-probs and entropy of given tokens, or one value a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.models.transformer import Decoder
from rlhf_mc.parallel.logprobs import Banned, vocabulary_parallel_logprobs
from rlhf_mc.parallel.packing import PackedMicrobatch


@dataclass(frozen=True)
class TokenLogprobs:
    """logprobs: float32[n] of the targets. entropy: float32[n] of the distributions they came from."""

    logprobs: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Sampling:
    """How the engine drew the tokens, so that the trainer's log-probs are those of the same distribution.

    temperature divides the logits. Before `min_tokens` response tokens, `stop_token_ids` could not be drawn.
    """

    temperature: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()


PLAIN = Sampling()


class ValueHead(nn.Module):
    """One number a token: a linear layer without bias, in fp32 whatever the model's precision; whole on every tensor rank.

    Under sequence parallel each tensor rank computes the values of its own tokens; megatron sums the weight's gradient
    over the tensor ranks because of the mark `sequence_parallel`.
    """

    def __init__(self, hidden: int, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden, dtype=torch.float32))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """[T', 1, H] -> float32[T']."""
        return F.linear(hidden.float(), self.weight).flatten()


@dataclass(frozen=True)
class OutputRows:
    """weight [rows, H]: a tensor rank's rows of an output layer, without padding (may be empty).  first: vocabulary row of the first."""

    weight: Tensor
    first: int

    @staticmethod
    def of(padded: Tensor, vocab: int, tensor_rank: int) -> OutputRows:
        """What of `padded`, a tensor rank's rows [V_padded/t, H], are rows of tokens."""
        first = tensor_rank * padded.size(0)
        real_rows = min(padded.size(0), max(0, vocab - first))
        return OutputRows(padded if real_rows == padded.size(0) else padded[:real_rows], first)


def padded_output_weight(decoder: Decoder) -> Tensor:
    """[V_padded/t, H], the output layer's weight on the last pipeline stage: the parameter itself, tied or not."""
    return decoder.shared_embedding_or_output_weight() if decoder.share_embeddings_and_output_weights else decoder.output_layer.weight


def answer_rows(decoder: Decoder, hidden: Tensor, packed: PackedMicrobatch) -> Tensor:
    """Collective over the tensor-parallel group. [n, H], of the hidden states [T', 1, H] those that answer, whole on every tensor rank.

    A rank's gradient of them is its part, to be summed over the group: the backward of this does so.
    """
    if decoder.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=decoder.pg_collection.tp)
    return hidden.squeeze(1).index_select(0, packed.rows)


def token_logprobs(decoder: Decoder, shape: ModelShape, rows: Tensor, packed: PackedMicrobatch, sampling: Sampling) -> TokenLogprobs:
    """Collective over the tensor-parallel group. Of the packed targets, from `answer_rows` [n, H]."""
    group = decoder.pg_collection.tp
    output = OutputRows.of(padded_output_weight(decoder), shape.vocab, group.rank())
    banned = Banned(packed.answer_numbers < sampling.min_tokens, sampling.stop_token_ids) if sampling.min_tokens else None
    answers = vocabulary_parallel_logprobs(rows, output.weight, packed.targets, output.first, sampling.temperature, group, banned)
    return TokenLogprobs(answers.logprobs, answers.entropy)


def token_values(decoder: Decoder, hidden: Tensor, packed: PackedMicrobatch) -> Tensor:
    """Collective over the tensor-parallel group. float32[n], the value head at the asked rows."""
    values = decoder.output_layer(hidden)
    if decoder.config.sequence_parallel:
        # Every tensor rank computes the same loss from the gathered values, so each keeps its own part of the gradient.
        values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=decoder.pg_collection.tp)
    return values.index_select(0, packed.rows)

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


def token_logprobs(decoder: Decoder, shape: ModelShape, hidden: Tensor, packed: PackedMicrobatch, sampling: Sampling) -> TokenLogprobs:
    """Collective over the tensor-parallel group. Of the packed targets, from the decoder's hidden states [T', 1, H]."""
    group = decoder.pg_collection.tp
    if decoder.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=group)
    weight = decoder.shared_embedding_or_output_weight() if decoder.share_embeddings_and_output_weights else decoder.output_layer.weight
    first_row = group.rank() * weight.size(0)
    real_rows = min(weight.size(0), max(0, shape.vocab - first_row))
    weight = weight if real_rows == weight.size(0) else weight[:real_rows]
    rows = hidden.squeeze(1).index_select(0, packed.rows)
    banned = Banned(packed.answer_numbers < sampling.min_tokens, sampling.stop_token_ids) if sampling.min_tokens else None
    answers = vocabulary_parallel_logprobs(rows, weight, packed.targets, first_row, sampling.temperature, group, banned)
    return TokenLogprobs(answers.logprobs, answers.entropy)


def token_values(decoder: Decoder, hidden: Tensor, packed: PackedMicrobatch) -> Tensor:
    """Collective over the tensor-parallel group. float32[n], the value head at the asked rows."""
    values = decoder.output_layer(hidden)
    if decoder.config.sequence_parallel:
        # Every tensor rank computes the same loss from the gathered values, so each keeps its own part of the gradient.
        values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=decoder.pg_collection.tp)
    return values.index_select(0, packed.rows)

"""How vLLM draws tokens, drafts them by Medusa heads, and checks the drafts, as the engine plugs it in. Imported by vllm_parts.py only.

Every token is drawn from the target's distribution by its sample's seed and its place in the response (seeded_draws.py); a draft is
accepted where it is the token that was drawn. That happens with probability p(draft), as in rejection sampling against a draft that
is a point mass (arXiv:2211.17192), and what is emitted is the drawn token in any case: samples under speculation are those of plain
decoding, token for token, up to the last bits of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.medusa import MedusaProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from rlhf_mc.pipeline.seeded_draws import draw, likeliest, uniforms


class SeededSampler(Sampler):
    """Draws one token for each running request. Of vLLM's sampling parameters it knows those that the engine uses: temperature, seed,
    min_tokens with stop tokens.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(logprobs_mode="processed_logprobs")
        self._runner = runner

    def forward(self, logits: Tensor, sampling_metadata: SamplingMetadata, **_: Any) -> SamplerOutput:
        """logits [requests, V]."""
        requests = numpy.arange(logits.size(0))
        tokens, logprobs = self.drawn(logits, requests, numpy.zeros_like(requests), sampling_metadata)
        return SamplerOutput(tokens[:, None].int(), as_tensors(tokens, logprobs))

    def drawn(self, logits: Tensor, requests: numpy.ndarray, ahead: numpy.ndarray, metadata: SamplingMetadata) -> tuple[Tensor, Tensor]:
        """For each row of logits [n, V] a token int64[n] and its log-prob float32[n]. The row belongs to request `requests[i]`, `ahead[i]`
        places after its next token.
        """
        parameters, lengths = self.running()
        places = lengths[requests] + ahead
        logits = logits.float()
        for row, (request, place) in enumerate(zip(requests.tolist(), places.tolist(), strict=True)):
            if place < parameters[request].min_tokens:
                logits[row, sorted(parameters[request].all_stop_token_ids)] = -torch.inf
        if not metadata.all_greedy:
            logits = logits / metadata.temperature[requests, None]
        logprobs = logits.log_softmax(dim=1)
        if metadata.all_greedy:
            tokens = likeliest(logits)
        else:
            seeds = [parameters[request].seed for request in requests.tolist()]
            tokens = draw(logprobs, uniforms(seeds, places.tolist()).to(logprobs.device))
        return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)

    def running(self) -> tuple[list[SamplingParams], numpy.ndarray]:
        """Of each running request its parameters, and the length of its response so far."""
        batch = self._runner.input_batch
        parameters = [self._runner.requests[ident].sampling_params for ident in batch.req_ids]
        count = len(parameters)
        return parameters, batch.num_tokens_no_spec[:count] - batch.num_prompt_tokens[:count]


class DraftChecker(nn.Module):
    """Stands where vLLM has its rejection sampler.

    accepted: of the last step, how many drafts gained each request that had some a token. Behind the end of a response no draft does.
    """

    def __init__(self, sampler: SeededSampler) -> None:
        super().__init__()
        self._sampler = sampler
        self.accepted: Sequence[int] = ()

    def forward(
        self, metadata: SpecDecodeMetadata, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: SamplingMetadata
    ) -> SamplerOutput:
        """logits [n, V]: of each request, one row for each draft and one more. Emits the accepted drafts and the token after them."""
        counts, longest = numpy.array(metadata.num_draft_tokens), metadata.max_spec_len
        requests = numpy.repeat(numpy.arange(len(counts)), counts + 1)
        starts = numpy.concatenate(([0], (counts + 1).cumsum()[:-1]))
        tokens, logprobs = self._sampler.drawn(logits, requests, numpy.arange(len(requests)) - starts[requests], sampling_metadata)
        places = numpy.arange(longest + 1)
        rows = torch.from_numpy(numpy.minimum(starts[:, None] + places, len(requests) - 1)).to(tokens.device)
        drawn = tokens[rows]
        drafts = torch.full((len(counts), longest), PLACEHOLDER_TOKEN_ID, dtype=tokens.dtype, device=tokens.device)
        drafts[torch.from_numpy(places[:-1] < counts[:, None])] = metadata.draft_token_ids.to(tokens.dtype)
        accepted = (drawn[:, :-1] == drafts).int().cumprod(dim=1).sum(dim=1)
        emitted = torch.arange(longest + 1, device=tokens.device) <= accepted[:, None]
        # vLLM fills up new requests of a batch with placeholders, which are no drafts.
        had_drafts = (drafts != PLACEHOLDER_TOKEN_ID).any(dim=1).tolist()
        each = zip(drawn.tolist(), accepted.tolist(), *self._sampler.running(), had_drafts, strict=True)
        self.accepted = [_gained(row[: count + 1], parameters, length) for row, count, parameters, length, had in each if had]
        return SamplerOutput(
            torch.where(emitted, drawn, PLACEHOLDER_TOKEN_ID).int(), as_tensors(drawn.flatten(), logprobs[rows].flatten())
        )


def _gained(tokens: Sequence[int], parameters: SamplingParams, length: int) -> int:
    """How many tokens after the first of these a response of `length` takes, which ends at a stop token or its bound."""
    tokens = tokens[: parameters.max_tokens - length]
    return next((place for place, token in enumerate(tokens) if token in parameters.all_stop_token_ids), len(tokens) - 1)


def as_tensors(tokens: Tensor, logprobs: Tensor) -> LogprobsTensors:
    """vLLM's record of the drawn tokens' log-probs. It has a place for ranks, which nobody asks for: they are 0."""
    return LogprobsTensors(tokens[:, None].int(), logprobs[:, None], torch.zeros_like(tokens, dtype=torch.int32))


class HeadsProposer(MedusaProposer):
    """Drafts the most likely token of each of the first `num_drafted` heads, a number that may change from step to step."""

    def __init__(self, vllm: MedusaProposer, target: nn.Module) -> None:
        """vllm: what vLLM made.  target: the model, whose output layer the heads share unless they have their own."""
        super().__init__(vllm.vllm_config, vllm.device)
        self.model, self._target = vllm.model, target
        self.num_drafted = 0
        self.shares_output = bool(getattr(self.model.config, "original_lm_head", False))
        if self.shares_output:
            # vLLM's heads have a copy of it, which would take memory and could fall behind.
            del self.model.lm_head, self.model.lm_heads

    def propose(self, num_speculative_tokens: int, target_hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """int64[requests, num_drafted], from the hidden states [requests, H] before each next token."""
        count, requests = self.num_drafted, target_hidden_states.size(0)
        if not count:
            return target_hidden_states.new_empty(requests, 0, dtype=torch.int64)
        hidden = [block(target_hidden_states) for block in self.model.blocks[:count]]
        if self.shares_output:
            return likeliest(self._target.compute_logits(torch.cat(hidden))).view(count, requests).t().contiguous()
        logits = (self.model.logits_processor(head, h) for head, h in zip(self.model.lm_heads[:count], hidden, strict=True))
        return torch.stack([likeliest(of_head) for of_head in logits], dim=1)

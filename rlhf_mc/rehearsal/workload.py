"""A rollout that never was: prompts and response lengths as a run may meet them, the same for the same settings on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch

from rlhf_mc.batch import PromptBatch
from rlhf_mc.config import Settings

_SHORTEST = 0.02  # of the longest that the settings allow
_SPREAD = 1.0  # of the logarithm of a response's length; half of the responses are longer than a quarter of the longest


@dataclass(frozen=True)
class Workload:
    """prompts: of one iteration.  responses: tokens of each sample, in the order of RolloutBatch."""

    prompts: PromptBatch
    responses: list[int]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        per_prompt = len(self.responses) // len(self.prompts)
        return [int(self.prompts.lengths[sample // per_prompt]) + n for sample, n in enumerate(self.responses)]

    @staticmethod
    def of(settings: Settings) -> Workload:
        """Prompts of evenly spread lengths, responses of log-normal ones, some as long as is allowed."""
        draws = numpy.random.default_rng(settings.trainer.seed)
        longest_prompt, longest = settings.data.max_prompt_tokens, settings.rollout.max_tokens
        prompts = draws.integers(max(1, int(_SHORTEST * longest_prompt)), longest_prompt + 1, settings.data.prompts_per_iteration)
        responses = longest / 4 * numpy.exp(_SPREAD * draws.standard_normal(settings.num_sequences))
        lengths = torch.from_numpy(prompts.astype(numpy.int64))
        tokens = torch.from_numpy(draws.integers(0, 100, int(prompts.sum())))
        batch = PromptBatch(tokens, lengths, [{} for _ in prompts], torch.arange(len(prompts)))
        return Workload(batch, responses.clip(max(1, _SHORTEST * longest), longest).astype(int).tolist())

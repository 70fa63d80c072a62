"""Turns the numbers of all scorers into the scores that PPO is paid with. Pure tensor code; runs in the trainer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_mc.config import Reward
from rlhf_mc.rewards.interface import RewardError
from rlhf_mc.rewards.pool import FunctionResult, RewardResults
from rlhf_mc.rewards.process import Outcome

REWARD_MODEL = "reward_model"


@dataclass(frozen=True)
class MixedRewards:
    """What each of B sequences earns, before KL.

    scores: float32[B], paid at the last response token.
    token_rewards: float32[R], paid at each response token on top of that; None where no function scores tokens.
    loss_mask: bool[B], false where the sequence must not train.
    parts: name -> float32[B], each scorer's own number without its weight, NaN where it has none.
    """

    scores: Tensor
    token_rewards: Tensor | None
    loss_mask: Tensor
    parts: dict[str, Tensor]


def mix_rewards(
    results: RewardResults,
    response_lengths: Tensor,
    truncated: Tensor,
    reward: Reward,
    model_scores: Tensor | None = None,
    model_weight: float = 1.0,
) -> MixedRewards:
    """Weighted sum of the reward model and the reward functions, for each sequence those that apply to it.

    response_lengths: int64[B].  truncated: bool[B].  model_scores: float[B], None where there is no reward model.

    A sequence on which a function with a weight failed has an unknown score: it is masked from the loss, and its
    score is that of the other scorers. A truncated one is scored as it is, or has `truncation_penalty` added, or is
    masked, as `reward.truncated` says. RewardError where a sequence has no scorer that pays.
    """
    num_sequences = response_lengths.numel()
    parts = {result.function.label: torch.tensor(result.values, dtype=torch.float32) for result in results.functions}
    paying = [result for result in results.functions if result.function.weight != 0]
    scores = torch.zeros(num_sequences, dtype=torch.float32)
    if model_scores is None:
        _check_each_is_paid(paying, results.data_sources)
    else:
        parts[REWARD_MODEL] = model_scores.float()
        scores += model_weight * parts[REWARD_MODEL]
    failed = torch.zeros(num_sequences, dtype=torch.bool)
    for result in paying:
        once = torch.tensor([values is None for values in result.token_values]) & ~parts[result.function.label].isnan()
        scores += result.function.weight * torch.where(once, parts[result.function.label], 0.0)
        failed |= torch.tensor([outcome in (Outcome.ERROR, Outcome.TIMEOUT) for outcome in result.outcomes])
    if reward.truncated == "penalise":
        scores = torch.where(truncated, scores + reward.truncation_penalty, scores)
    loss_mask = ~failed & ~truncated if reward.truncated == "mask" else ~failed
    return MixedRewards(scores, _token_rewards(paying, response_lengths), loss_mask, parts)


def _token_rewards(paying: list[FunctionResult], response_lengths: Tensor) -> Tensor | None:
    """Weighted sum of the functions that score tokens, float32[R]; 0 at the tokens of the other sequences."""
    scoring_tokens = [result for result in paying if any(values is not None for values in result.token_values)]
    if not scoring_tokens:
        return None
    total = torch.zeros(int(response_lengths.sum()), dtype=torch.float32)
    starts = (response_lengths.cumsum(0) - response_lengths).tolist()
    for result in scoring_tokens:
        for start, values in zip(starts, result.token_values):
            if values is not None:
                total[start : start + len(values)] += result.function.weight * torch.tensor(values, dtype=torch.float32)
    return total


def _check_each_is_paid(paying: list[FunctionResult], data_sources: list[str | None]) -> None:
    for b, source in enumerate(data_sources):
        if all(result.outcomes[b] is Outcome.NOT_APPLICABLE for result in paying):
            known = sorted({str(result.function.data_source) for result in paying})
            raise RewardError(
                f"nothing pays for a row with data_source {source!r}: there is no reward model, and the reward functions "
                f"with a weight are for data_source {', '.join(known) or '(there are none)'}; "
                "add a function for it, or one with data_source null"
            )

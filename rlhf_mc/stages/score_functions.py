"""Reward functions over a rollout: each rank hands its share of the samples to its own worker processes."""

from __future__ import annotations

import torch.distributed as dist

from rlhf_mc.batch import RolloutBatch
from rlhf_mc.rewards.interface import RewardError, RewardSample
from rlhf_mc.rewards.pool import FunctionResult, PendingRewards, RewardResults
from rlhf_mc.stages.start import Run


def submit_functions(run: Run, rollout: RolloutBatch) -> PendingRewards:
    """Hands every size-th sample, from this rank's number on, to the workers, and returns at once."""
    decode = run.tokenizer.decode
    samples = []
    for b in range(run.world.rank, len(rollout), run.world.size):
        prompt, response = rollout.prompt(b), rollout.response(b)
        samples.append(
            RewardSample(
                prompt=decode(prompt, skip_special_tokens=True),
                response=decode(response, skip_special_tokens=True),
                prompt_ids=prompt,
                response_ids=response,
                row=rollout.rows[b],
                truncated=bool(rollout.truncated[b]),
            )
        )
    return run.reward_pool.submit(samples)


def collect_functions(run: Run, pending: PendingRewards) -> RewardResults:
    """Collective over all ranks. The results of all samples, in order, on every rank.

    Where a function fails too often on any rank's share, every rank raises RewardError with that rank's message.
    """
    try:
        with run.trace.span("wait/rewards"):
            share: RewardResults | str = run.reward_pool.collect([pending])
    except RewardError as error:
        share = f"rank {run.world.rank}: {error}"
    shares: list[RewardResults | str] = [share] * run.world.size
    if run.world.size > 1:
        dist.all_gather_object(shares, share, group=run.world.everyone)
    for other in shares:
        if isinstance(other, str):
            raise RewardError(other)
    return _interleaved(shares)


def _interleaved(shares: list[RewardResults]) -> RewardResults:
    """Undoes the dealing of samples to ranks: sample b is the (b // size)-th of share b % size."""

    def merge(parts: list[list]) -> list:
        return [parts[b % len(parts)][b // len(parts)] for b in range(sum(map(len, parts)))]

    functions = [
        FunctionResult(
            function=results[0].function,
            values=merge([r.values for r in results]),
            token_values=merge([r.token_values for r in results]),
            outcomes=merge([r.outcomes for r in results]),
        )
        for results in zip(*(share.functions for share in shares))
    ]
    return RewardResults(functions, merge([share.data_sources for share in shares]))

"""Reward functions over a rollout: each rank hands its share of the samples to its own worker processes, chunk by chunk."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor


from rlhf_mc.batch import RolloutBatch
from rlhf_mc.rewards.interface import RewardError, RewardSample
from rlhf_mc.rewards.pool import FunctionResult, PendingRewards, RewardResults
from rlhf_mc.stages.start import Run


class FunctionScores:
    """The reward functions' part of one rollout. Chunks are decoded to text in a thread of its own, and then scored in the pool."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="detokenize")
        self._samples: list[list[int]] = [[] for _ in range(run.world.size)]
        self._pending: list[Future[PendingRewards]] = []

    def submit(self, rollout: RolloutBatch, samples: list[int]) -> None:
        """Returns at once. rollout: of these samples, whose numbers decide which rank scores each. No collective."""
        size = self._run.world.size
        for sample in samples:
            self._samples[sample % size].append(sample)
        mine = [b for b, sample in enumerate(samples) if sample % size == self._run.world.rank]
        self._pending.append(self._thread.submit(self._decode_and_submit, rollout, mine))

    def _decode_and_submit(self, rollout: RolloutBatch, mine: list[int]) -> PendingRewards:
        def text(token_ids: list[int]) -> str:
            return self._run.tokenizer.decode(token_ids, skip_special_tokens=True)

        with self._run.trace.span("detokenize", track="text"):
            samples = [
                RewardSample(
                    prompt=text(rollout.prompt(b)),
                    response=text(rollout.response(b)),
                    prompt_ids=rollout.prompt(b),
                    response_ids=rollout.response(b),
                    row=rollout.rows[b],
                    truncated=bool(rollout.truncated[b]),
                )
                for b in mine
            ]
        return self._run.reward_pool.submit(samples)

    def collect(self) -> tuple[RewardResults, float]:
        """Collective over all ranks. The results of all samples in order, on every rank; and the seconds that this rank's workers
        were busy, each with its part.

        Where a function fails too often on any rank's share, every rank raises RewardError with that rank's message.
        """
        run, busy = self._run, 0.0
        try:
            with run.trace.span("wait/rewards"):
                pending = [part.result() for part in self._pending]
                share: RewardResults | str = run.reward_pool.collect(pending)
                busy = sum(part.seconds() for part in pending) / run.settings.reward.num_workers
        except RewardError as error:
            share = f"rank {run.world.rank}: {error}"
        finally:
            self._thread.shutdown()
        shares = run.world.from_everyone(share)
        for other in shares:
            if isinstance(other, str):
                raise RewardError(other)
        return _joined(shares, self._samples), busy


def _joined(shares: list[RewardResults], samples: list[list[int]]) -> RewardResults:
    """The shares of all ranks in the order of the samples. samples: by rank, the numbers of those in its share."""
    place = {sample: (rank, b) for rank, numbers in enumerate(samples) for b, sample in enumerate(numbers)}

    def merge(parts: list[list]) -> list:
        return [parts[rank][b] for _, (rank, b) in sorted(place.items())]

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

"""From prompts to requests for the replicas, and from their completions to one RolloutBatch, the same on every rank.

Everything is a pure function but `gather_completions`, the one exchange between ranks. Sample j of prompt i is sample
i * samples_per_prompt + j, the order of RolloutBatch. The engine itself is in engine.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mc.batch import PromptBatch, RolloutBatch, offsets_of
from rlhf_mc.config import Rollout
from rlhf_mc.parallel.grids import RolloutGrid

FINISH_REASONS = ("stop", "length")
_NO_STOP_TOKEN = -1


@dataclass(frozen=True)
class SampleRequest:
    """One response to sample: prompt token ids, a seed of its own, and the bounds of the response in tokens."""

    prompt_ids: list[int]
    seed: int
    max_tokens: int
    min_tokens: int = 0


@dataclass(frozen=True)
class Completion:
    """One sampled response. It ends with the stop token where one was sampled: that token is trained on as well.

    logprobs: the engine's log-prob of each token under the distribution that it was sampled from.
    finish_reason: "stop" or "length".  stop_token: the token id that ended it, None after "length".
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_token: int | None


def sample_seed(run_seed: int, iteration: int, sample: int) -> int:
    """A seed in [0, 2**63) for one sample of one iteration, independent of which replica draws it.

    A hash, so that neighbouring iterations and samples share no stream: torch's CPU generator keeps the low 32 bits only.
    """
    key = f"{run_seed}/{iteration}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def requests_for(prompts: PromptBatch, rollout: Rollout, run_seed: int, iteration: int) -> list[SampleRequest]:
    """The requests of all B samples, in the order of RolloutBatch, each with its own seed."""
    prompt_ids = [tokens.tolist() for tokens in prompts.tokens.split(prompts.lengths.tolist())]
    return [
        SampleRequest(
            prompt_ids=prompt_ids[sample // rollout.samples_per_prompt],
            seed=sample_seed(run_seed, iteration, sample),
            max_tokens=rollout.max_tokens,
            min_tokens=rollout.min_tokens,
        )
        for sample in range(len(prompts) * rollout.samples_per_prompt)
    ]


def deal(expected_tokens: Sequence[float], samples_per_prompt: int, num_replicas: int) -> list[list[int]]:
    """Sample indices for each replica: every sample once, counts that differ by one at most, long ones spread.

    expected_tokens: of each prompt, tokens that one sample of it is expected to have. Samples are dealt from the longest to
    the shortest, forth and back over the replicas, so that the first replica does not get the longer one of every round.
    Each hand is sorted: samples of one prompt stay neighbours, where the prefix cache serves them.
    """
    samples = range(len(expected_tokens) * samples_per_prompt)
    longest_first = sorted(samples, key=lambda sample: -expected_tokens[sample // samples_per_prompt])
    hands: list[list[int]] = [[] for _ in range(num_replicas)]
    for position, sample in enumerate(longest_first):
        tour, seat = divmod(position, num_replicas)
        hands[seat if tour % 2 == 0 else num_replicas - 1 - seat].append(sample)
    return [sorted(hand) for hand in hands]


class ResponseLengths:
    """How long the responses to each prompt were when it was last sampled. The same on every rank, since rollouts are."""

    def __init__(self) -> None:
        self._of_prompt: dict[tuple[int, ...], float] = {}
        self._mean = 0.0

    def expected_tokens(self, prompts: PromptBatch) -> list[float]:
        """For each prompt, its tokens and those of one response; of a prompt never seen, the mean response of the last rollout."""
        return [
            length + self._of_prompt.get(tuple(tokens.tolist()), self._mean)
            for tokens, length in zip(prompts.tokens.split(prompts.lengths.tolist()), prompts.lengths.tolist())
        ]

    def observe(self, rollout: RolloutBatch) -> None:
        """Remembers the mean response length of each prompt of a rollout."""
        lengths = rollout.response_lengths.double()
        self._mean = float(lengths.mean())
        counts = torch.bincount(rollout.groups)
        means = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, rollout.groups, lengths) / counts
        firsts = dict(zip(reversed(rollout.groups.tolist()), reversed(range(len(rollout)))))
        for group, first in firsts.items():
            self._of_prompt[tuple(rollout.prompt(first))] = float(means[group])

    def copy(self) -> ResponseLengths:
        """What is remembered now; it stays so."""
        copied = ResponseLengths()
        copied._of_prompt, copied._mean = dict(self._of_prompt), self._mean
        return copied

    def state(self) -> dict[str, Any]:
        """All that is remembered, as JSON has it."""
        return {"mean": self._mean, "of_prompt": [[list(tokens), length] for tokens, length in self._of_prompt.items()]}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> ResponseLengths:
        """What has this `state`."""
        lengths = ResponseLengths()
        lengths._mean = state["mean"]
        lengths._of_prompt = {tuple(tokens): length for tokens, length in state["of_prompt"]}
        return lengths


def gather_completions(
    mine: Mapping[int, Completion], grid: RolloutGrid, group: dist.ProcessGroup
) -> dict[int, Completion]:
    """Collective over `group`, which holds all ranks (gloo): the completions of all replicas, by sample, on every rank.

    mine: those of this rank's replica, by sample; only the replica's first rank contributes.
    Raises ValueError on every rank where a sample came back twice.
    """
    ours = sorted(mine.items()) if grid.tensor_rank == 0 else []
    header = torch.tensor([_header(sample, completion) for sample, completion in ours], dtype=torch.int64)
    tokens = torch.tensor([token for _, c in ours for token in c.token_ids], dtype=torch.int64)
    logprobs = torch.tensor([value for _, c in ours for value in c.logprobs], dtype=torch.float32)
    everyone = zip(*(_all_gather_ragged(values, group) for values in (header.flatten(), tokens, logprobs)), strict=True)
    found = sorted((pair for shares in everyone for pair in _completions_from(*shares)), key=lambda pair: pair[0])
    samples = [sample for sample, _ in found]
    if len(set(samples)) < len(samples):
        raise ValueError(f"samples came back as {samples}: each must come back once")
    return dict(found)


def assemble_rollout(
    prompts: PromptBatch, samples_per_prompt: int, completions: Mapping[int, Completion], samples: Sequence[int] | None = None
) -> RolloutBatch:
    """Prompts and completions as one RolloutBatch, of these samples in this order; None: of all.

    Raises ValueError where a sample has not come back.
    """
    wanted = range(len(prompts) * samples_per_prompt) if samples is None else samples
    missing = [sample for sample in wanted if sample not in completions]
    if missing:
        raise ValueError(f"{len(missing)} of {len(wanted)} samples have not come back, the first is {missing[0]}")
    groups = torch.tensor([sample // samples_per_prompt for sample in wanted], dtype=torch.int64)
    chosen = [completions[sample] for sample in wanted]
    prompt_tokens = prompts.tokens.split(prompts.lengths.tolist())
    pieces = [
        piece
        for group, completion in zip(groups.tolist(), chosen)
        for piece in (prompt_tokens[group], torch.tensor(completion.token_ids, dtype=torch.int64))
    ]
    return RolloutBatch(
        tokens=torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64),
        prompt_lengths=prompts.lengths[groups],
        response_lengths=torch.tensor([len(c.token_ids) for c in chosen], dtype=torch.int64),
        rollout_logprobs=torch.tensor([value for c in chosen for value in c.logprobs], dtype=torch.float32),
        truncated=torch.tensor([c.finish_reason == "length" for c in chosen], dtype=torch.bool),
        stop_reasons=[c.finish_reason for c in chosen],
        groups=groups,
        rows=[prompts.rows[group] for group in groups.tolist()],
    )


def _header(index: int, completion: Completion) -> list[int]:
    """One completion's numbers beside its tokens: sample, length, finish reason, stop token."""
    stop = _NO_STOP_TOKEN if completion.stop_token is None else completion.stop_token
    return [index, len(completion.token_ids), FINISH_REASONS.index(completion.finish_reason), stop]


def _completions_from(header: Tensor, tokens: Tensor, logprobs: Tensor) -> list[tuple[int, Completion]]:
    """One rank's share, (sample, completion) pairs, from what `_header` and the flat tokens and log-probs hold."""
    rows = header.view(-1, 4)
    starts = offsets_of(rows[:, 1]).tolist()
    return [
        (
            index,
            Completion(
                token_ids=tokens[start : start + length].tolist(),
                logprobs=logprobs[start : start + length].tolist(),
                finish_reason=FINISH_REASONS[reason],
                stop_token=None if stop == _NO_STOP_TOKEN else stop,
            ),
        )
        for (index, length, reason, stop), start in zip(rows.tolist(), starts)
    ]


def _all_gather_ragged(values: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Collective over `group`: the flat tensor of each rank, in rank order; their sizes may differ."""
    size = torch.tensor([values.numel()])
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = int(torch.cat(sizes).max())
    padded = torch.cat([values, values.new_zeros(longest - values.numel())])
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [share[: int(size)] for share, size in zip(gathered, sizes)]

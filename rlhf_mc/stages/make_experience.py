"""Make experience: prompts are answered by the engine, and the answers are scored by each role in its turn, chunk by chunk."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_mc.algorithms.advantages import gae, group_advantages, whiten
from rlhf_mc.algorithms.kl import mean_sequence_kl, token_rewards
from rlhf_mc.batch import Experience, PromptBatch, RolloutBatch, segment_sum
from rlhf_mc.config import Rollout, Settings
from rlhf_mc.medusa.hidden_states import HiddenStates
from rlhf_mc.models.passes import HandOver, score
from rlhf_mc.models.role import Role
from rlhf_mc.offload import EMPTY, Part, Visit
from rlhf_mc.parallel.packing import Asked
from rlhf_mc.pipeline.chunks import Chunk, Chunker
from rlhf_mc.pipeline.dispatch import Completion, assemble_rollout, deal, requests_for
from rlhf_mc.pipeline.executor import execute
from rlhf_mc.pipeline.generation import Generation
from rlhf_mc.pipeline.schedule import FIRST_CHUNKS, Costs, Operation, Resources, choose_chunks, operations_of
from rlhf_mc.rewards.mix import MixedRewards, mix_rewards
from rlhf_mc.rewards.pool import RewardResults
from rlhf_mc.stages.score_functions import FunctionScores
from rlhf_mc.stages.start import Run


def scoring_roles(run: Run) -> list[Role]:
    """In the order in which they score: such that each is loaded as seldom as possible. The critic, last here, is first to train."""
    return [role for role in (Role.REFERENCE, Role.REWARD, Role.ACTOR, Role.CRITIC) if role in run.roles]


def asked_of(role: Role) -> Asked:
    """The reward model scores a sequence at its last token; the others say a number for each response token."""
    return "last" if role is Role.REWARD else "predicted"


def make_experience(run: Run, iteration: int) -> Experience:
    """Collective over all ranks. One rollout with everything that the update needs, the same on every rank."""
    with run.clock.stage("make_experience"):
        return _made(run, iteration).experience()


def make_samples(run: Run, iteration: int) -> tuple[RolloutBatch, Tensor]:
    """Collective over all ranks. One rollout and the actor's log-probs of it [R], for draft heads alone: `run.hidden` has their rows."""
    with run.clock.stage("make_experience"):
        making = _made(run, iteration)
        return making.rollout, making.actor_logprobs()


def _made(run: Run, iteration: int) -> Making:
    """All operations of one rollout are done."""
    prompts = run.sources.prompts.batch(iteration)
    making = Making(run, prompts, iteration, num_chunks(run, prompts))
    execute(making.operations, making)
    run.costs = making.costs()
    run.lengths.observe(making.rollout)
    return making


def start_rollout(run: Run, prompts: PromptBatch, rollout: Rollout, iteration: int, greedy: bool = False) -> Generation:
    """Collective over all ranks. Deals the samples to the replicas, which begin."""
    requests = requests_for(prompts, rollout, run.settings.trainer.seed, iteration)
    hands = deal(run.lengths.expected_tokens(prompts), rollout.samples_per_prompt, run.sampler.num_replicas)
    return run.sampler.start(requests, hands, run.weight_version, run.drafting.schedule, greedy)


def resources_of(run: Run) -> Resources:
    """What a schedule may use side by side."""
    return Resources.of(run.settings, len(run.roles))


def num_chunks(run: Run, prompts: PromptBatch) -> int:
    """Chunks of the next rollout: as configured, else what the costs of the last one say."""
    pipeline = run.settings.pipeline
    if pipeline.chunks is not None:
        return pipeline.chunks
    if run.costs is None:
        return FIRST_CHUNKS
    units = len(prompts) if pipeline.chunk_by == "prompts" else len(prompts) * run.settings.rollout.samples_per_prompt
    return choose_chunks(run.costs, resources_of(run), units)


class Making:
    """One iteration's experience in the making: the work that a schedule orders. Collective calls, alike on every rank.

    operations: the schedule.
    """

    def __init__(self, run: Run, prompts: PromptBatch, iteration: int, chunks: int) -> None:
        self._run, self._prompts = run, prompts
        self._samples_per_prompt = run.settings.rollout.samples_per_prompt
        self._chunker = Chunker(len(prompts), self._samples_per_prompt, chunks, run.settings.pipeline.chunk_by)
        self._completions: dict[int, Completion] = {}
        self._chunks: list[Chunk] = []
        self._functions = FunctionScores(run)
        self._numbers: dict[Role, dict[int, Tensor]] = {role: {} for role in scoring_roles(run)}
        self._results: RewardResults | None = None
        self._seconds: dict[str, float] = {}
        self.operations = self._schedule()
        self._to_score = deque(Role(op.role) for op in self.operations if op.kind == "score")
        if resources_of(run).can_score_between:
            run.residency.expect(Visit(self._to_score[0], Part.PARAMS))
        if run.trains_heads:
            run.hidden = HiddenStates.of(run.world, run.settings, iteration)
        self._generation = start_rollout(run, prompts, run.settings.rollout, iteration)

    def _schedule(self) -> list[Operation]:
        return operations_of(self._run.settings, [role.value for role in self._numbers], len(self._chunker.sizes))

    def generate(self, chunks: Sequence[int]) -> None:
        """Steps the engine until these chunks are complete."""
        with self._run.clock.stage("generate"):
            start = time.perf_counter()
            while len(self._chunks) <= max(chunks):
                finished = self._generation.advance()
                self._completions |= finished
                self._chunks += self._chunker.add(finished)
                self._run.safe_point()
            self._spent("generate", start)

    def submit(self, chunks: Sequence[int]) -> None:
        """Hands chunks to the reward functions, one by one, so that they can begin with the first."""
        for chunk in chunks:
            self._functions.submit(self._of([chunk]), list(self._chunks[chunk]))

    def sleep(self) -> None:
        """The rollout is complete: the engine's memory is the trainer's."""
        self._run.loads = self._generation.replicas()
        for change in self._run.drafting.observe(load.drafts for load in self._run.loads):
            self._run.tracker.say(change)
        if not self._run.sampler.shares_devices:
            self._seconds["generate"] = max(load.busy for load in self._run.loads)
        self._run.sampler.sleep()

    def score(self, role: str, chunks: Sequence[int]) -> None:
        """The role's pass over these chunks, with its params alone on the device."""
        run, member = self._run, Role(role)
        part = self._of(chunks)
        with run.clock.stage("score"), run.clock.stage(f"score/{role}"):
            start = time.perf_counter()
            with run.residency.on_device(member, Part.PARAMS, self._following()):
                start = self._spent("load/" + role, start)
                numbers = score_on_device(run, member, part, self._hand_over(member, chunks))
                self._spent("score/" + role, start)
        run.safe_point()
        sizes = [1] * len(part) if asked_of(member) == "last" else part.response_lengths.tolist()
        self._numbers[member] |= zip(self._samples_of(chunks), numbers.split(sizes), strict=True)

    def _hand_over(self, role: Role, chunks: Sequence[int]) -> HandOver | None:
        """Where the actor's hidden states go, of which its draft heads learn."""
        if role is not Role.ACTOR or self._run.hidden is None:
            return None
        return self._run.hidden.receiver(self._samples_of(chunks))

    def _following(self) -> Visit | None:
        """Which visit of the device comes after this pass; None: the one that comes after make_experience. EMPTY: load nothing ahead."""
        self._to_score.popleft()
        if self._run.settings.pipeline.mode == "serial":
            return EMPTY
        return Visit(self._to_score[0], Part.PARAMS) if self._to_score else None

    def collect(self) -> None:
        """Waits for the reward functions."""
        with self._run.clock.stage("reward_functions"):
            self._results, self._seconds["reward"] = self._functions.collect()

    @property
    def rollout(self) -> RolloutBatch:
        """All samples in order, once all have come back."""
        return assemble_rollout(self._prompts, self._samples_per_prompt, self._completions)

    def actor_logprobs(self) -> Tensor:
        """float32[R], in the order of the samples."""
        return self._joined(Role.ACTOR)

    def experience(self) -> Experience:
        """All that was generated, rewarded and scored, in the order of the samples."""
        settings, rollout = self._run.settings, self.rollout
        scores = self._joined(Role.REWARD) if Role.REWARD in self._numbers else None
        mixed = mix_rewards(
            self._results, rollout.response_lengths, rollout.truncated, settings.reward, scores, settings.reward_model.weight
        )
        logprobs, references = self._joined(Role.ACTOR), self._joined(Role.REFERENCE)
        values = self._joined(Role.CRITIC) if Role.CRITIC in self._numbers else torch.zeros_like(logprobs)
        return assemble_experience(self._run, rollout, mixed, logprobs, references, values)

    def costs(self) -> Costs:
        """Collective over all ranks. What this rollout took, the mean over the ranks, so that all plan alike.

        A pass costs something however little it scores: as much as the probe's, which the last sync measured.
        """
        names = ["generate", "reward", *(f"{what}/{role.value}" for what in ("score", "load") for role in self._numbers)]
        seconds = [self._run.probe_seconds, *(self._seconds.get(name, 0.0) for name in names)]
        total = self._run.world.sum_over_ranks(torch.tensor(seconds, dtype=torch.float64))
        overhead, *means = (total / self._run.world.size).tolist()
        mean = dict(zip(names, means, strict=True))
        passes = sum(op.kind == "score" for op in self.operations) // len(self._numbers)
        return Costs(
            generate=mean["generate"],
            score={role.value: max(0.0, mean[f"score/{role.value}"] - passes * overhead) for role in self._numbers},
            overhead=overhead,
            load={role.value: mean[f"load/{role.value}"] for role in self._numbers},
            reward=mean["reward"],
        )

    def _of(self, chunks: Sequence[int]) -> RolloutBatch:
        return assemble_rollout(self._prompts, self._samples_per_prompt, self._completions, self._samples_of(chunks))

    def _samples_of(self, chunks: Sequence[int]) -> list[int]:
        return sorted(sample for chunk in chunks for sample in self._chunks[chunk])

    def _joined(self, role: Role) -> Tensor:
        numbers = self._numbers[role]
        return torch.cat([numbers[sample] for sample in range(len(numbers))])

    def _spent(self, name: str, start: float) -> float:
        """Adds the seconds since `start`; now."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - start
        return now


def score_on_device(run: Run, role: Role, rollout: RolloutBatch, hand_over: HandOver | None = None) -> Tensor:
    """Collective over all ranks. Of a role whose params are present: log-probs or values [R], or scores [B]."""
    section = getattr(run.settings, role.value)
    return score(run.roles[role], rollout.sequences, asked_of(role), section.scoring_micro_batch, run.sampling, hand_over)


def assemble_experience(
    run: Run, rollout: RolloutBatch, mixed: MixedRewards, old_logprobs: Tensor, ref_logprobs: Tensor, values: Tensor
) -> Experience:
    """KL into the rewards, advantages from them; the KL controller moves on. No collective."""
    algorithm, lengths = run.settings.algorithm, rollout.response_lengths
    coef = run.kl.coef if algorithm.kl.use == "reward" else 0.0
    rewards = token_rewards(mixed.scores, old_logprobs, ref_logprobs, coef, lengths, mixed.token_rewards)
    advantages, returns = estimate_advantages(run.settings, rewards, values, lengths, mixed.loss_mask)
    divergence = mean_sequence_kl(old_logprobs, ref_logprobs, lengths)
    if math.isfinite(divergence):  # else the guard skips the update, and the coefficient stays
        run.kl = run.kl.after(divergence, len(rollout))
    return Experience(
        rollout=rollout,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        scores=mixed.scores,
        rewards=rewards,
        advantages=advantages,
        returns=returns,
        loss_mask=mixed.loss_mask.repeat_interleave(lengths),
        reward_parts=mixed.parts,
    )


def estimate_advantages(
    settings: Settings, rewards: Tensor, values: Tensor, response_lengths: Tensor, trains: Tensor
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [R] of rewards and values [R]; trains: bool[B], samples in the order of their prompts.

    With a critic by GAE, whitened over all tokens that train. Without one, a sample's tokens share one advantage: its rewards, added up,
    against those of the other samples of its prompt. One that does not train is compared with nothing, and nothing with it.
    """
    algorithm = settings.algorithm
    if settings.has_critic:
        advantages, returns = gae(rewards, values, response_lengths, algorithm.gamma, algorithm.lam)
        if algorithm.whiten_advantages:
            advantages = whiten(advantages, trains.repeat_interleave(response_lengths))
        return advantages, returns
    samples = torch.arange(response_lengths.numel())
    prompts = torch.where(trains, samples // settings.rollout.samples_per_prompt, -1 - samples)
    totals = segment_sum(rewards, response_lengths)
    advantages = group_advantages(totals, prompts, algorithm.advantages)
    return advantages.repeat_interleave(response_lengths), totals.repeat_interleave(response_lengths)

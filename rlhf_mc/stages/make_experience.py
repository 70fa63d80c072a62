"""Make experience: prompts are answered by the engine, and the answers are scored by each role in its turn."""

from __future__ import annotations

from torch import Tensor

from rlhf_mc.algorithms.advantages import gae, whiten
from rlhf_mc.algorithms.kl import mean_sequence_kl, token_rewards
from rlhf_mc.batch import Experience, PromptBatch, RolloutBatch
from rlhf_mc.config import Rollout
from rlhf_mc.models.passes import score
from rlhf_mc.models.role import Role
from rlhf_mc.offload import Part
from rlhf_mc.parallel.packing import Asked
from rlhf_mc.pipeline.dispatch import Completion, assemble_rollout, deal, requests_for
from rlhf_mc.rewards.mix import MixedRewards, mix_rewards
from rlhf_mc.stages.score_functions import collect_functions, submit_functions
from rlhf_mc.stages.start import Run


def generate(run: Run, prompts: PromptBatch, rollout: Rollout, iteration: int, greedy: bool = False) -> RolloutBatch:
    """Collective over all ranks. Each replica answers its share of the samples; every rank gets all of them, in order.

    Afterwards the engine is asleep where it shares the trainer's device: its memory is the trainer's.
    """
    requests = requests_for(prompts, rollout, run.settings.trainer.seed, iteration)
    hands = deal(prompts.lengths.tolist(), rollout.samples_per_prompt, run.sampler.num_replicas)
    generation = run.sampler.start(requests, hands, run.weight_version, greedy)
    completions: dict[int, Completion] = {}
    while not generation.done:
        completions |= generation.advance()
    run.sampler.sleep()
    return assemble_rollout(prompts, rollout.samples_per_prompt, [completions[sample] for sample in range(len(requests))])


def score_with(run: Run, role: Role, rollout: RolloutBatch, asked: Asked) -> Tensor:
    """Collective over all ranks. The role alone on the device; its log-probs or values [R], or its scores [B]."""
    section = getattr(run.settings, role.value)
    with run.clock.stage(f"score/{role.value}"), run.residency.on_device(role, Part.PARAMS):
        return score(run.roles[role], rollout.sequences, asked, section.scoring_micro_batch, run.sampling)


def make_experience(run: Run, iteration: int) -> Experience:
    """Collective over all ranks. One rollout with everything that the update needs, the same on every rank.

    The order of the roles is such that each is loaded as seldom as possible: the critic, last here, is first to train.
    """
    with run.clock.stage("generate"):
        rollout = generate(run, run.sources.prompts.batch(iteration), run.settings.rollout, iteration)
    functions = submit_functions(run, rollout)
    with run.clock.stage("score"):
        ref_logprobs = score_with(run, Role.REFERENCE, rollout, "predicted")
        model_scores = score_with(run, Role.REWARD, rollout, "last") if Role.REWARD in run.roles else None
        old_logprobs = score_with(run, Role.ACTOR, rollout, "predicted")
        values = score_with(run, Role.CRITIC, rollout, "predicted")
    with run.clock.stage("reward_functions"):
        results = collect_functions(run, functions)
    settings = run.settings
    mixed = mix_rewards(
        results, rollout.response_lengths, rollout.truncated, settings.reward, model_scores, settings.reward_model.weight
    )
    return assemble_experience(run, rollout, mixed, old_logprobs, ref_logprobs, values)


def assemble_experience(
    run: Run, rollout: RolloutBatch, mixed: MixedRewards, old_logprobs: Tensor, ref_logprobs: Tensor, values: Tensor
) -> Experience:
    """KL into the rewards, advantages by GAE, whitened over the whole rollout; the KL controller moves on. No collective."""
    algorithm, lengths = run.settings.algorithm, rollout.response_lengths
    coef = run.kl.coef if algorithm.kl.use == "reward" else 0.0
    rewards = token_rewards(mixed.scores, old_logprobs, ref_logprobs, coef, lengths, mixed.token_rewards)
    advantages, returns = gae(rewards, values, lengths, algorithm.gamma, algorithm.lam)
    loss_mask = mixed.loss_mask.repeat_interleave(lengths)
    if algorithm.whiten_advantages:
        advantages = whiten(advantages, loss_mask)
    run.kl = run.kl.after(mean_sequence_kl(old_logprobs, ref_logprobs, lengths), len(rollout))
    return Experience(
        rollout=rollout,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        scores=mixed.scores,
        rewards=rewards,
        advantages=advantages,
        returns=returns,
        loss_mask=loss_mask,
        reward_parts=mixed.parts,
    )

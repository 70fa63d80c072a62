"""Evaluate: greedy answers to held-out prompts, scored by the reward functions and the reward model."""

from __future__ import annotations

from dataclasses import replace

import torch

from rlhf_mc.batch import Experience, PromptBatch, RolloutBatch
from rlhf_mc.models.role import Role
from rlhf_mc.offload import Part
from rlhf_mc.pipeline.dispatch import Completion, assemble_rollout
from rlhf_mc.stages.make_experience import score_on_device, start_rollout
from rlhf_mc.stages.score_functions import FunctionScores
from rlhf_mc.stages.start import Run
from rlhf_mc.stages.sync_weights import sync_weights
from rlhf_mc.tracking import SampleRow


def evaluate(run: Run, iteration: int) -> dict[str, float]:
    """Collective over all ranks. val/NAME for each reward function, val/reward_model, val/response_length; {} without held-out prompts.

    Syncs the weights first; afterwards the engine is asleep where it shares the trainer's device.
    """
    if run.sources.validation is None:
        return {}
    sync_weights(run)
    with run.clock.stage("evaluate"):
        rollout = greedy_rollout(run, run.sources.validation.all(), iteration)
        functions = FunctionScores(run)
        functions.submit(rollout, list(range(len(rollout))))
        results, _ = functions.collect()
        metrics = {f"val/{r.function.label}": torch.tensor(r.values).nanmean().item() for r in results.functions}
        metrics["val/response_length"] = rollout.response_lengths.float().mean().item()
        if Role.REWARD in run.roles:
            with run.residency.on_device(Role.REWARD, Part.PARAMS):
                metrics["val/reward_model"] = score_on_device(run, Role.REWARD, rollout).mean().item()
    return metrics


def greedy_rollout(run: Run, prompts: PromptBatch, iteration: int) -> RolloutBatch:
    """Collective over all ranks. One greedy answer to each prompt. Afterwards the engine is asleep."""
    once = replace(run.settings.rollout, samples_per_prompt=1)
    generation = start_rollout(run, prompts, once, iteration, greedy=True)
    completions: dict[int, Completion] = {}
    while not generation.done:
        completions |= generation.advance()
        run.safe_point()
    run.sampler.sleep()
    return assemble_rollout(prompts, 1, completions)


def sample_rows(run: Run, experience: Experience) -> list[SampleRow]:
    """The first few samples of an iteration, as a person reads them."""
    rollout, decode = experience.rollout, run.tokenizer.decode
    return [
        SampleRow(
            prompt=decode(rollout.prompt(b)),
            response=decode(rollout.response(b)),
            score=float(experience.scores[b]),
            parts={name: float(values[b]) for name, values in experience.reward_parts.items()},
            finish_reason=rollout.stop_reasons[b],
        )
        for b in range(min(len(rollout), run.settings.trainer.num_sample_rows))
    ]

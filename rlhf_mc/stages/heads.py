"""Draft heads alone, on samples of a finished model: torchrun -m rlhf_mc.stages.heads --config FILE [key=value ...]

The actor is frozen (Medusa-1, arXiv:2401.10774): it answers data.train by the engine, which drafts with the heads as they are by
then, and the heads learn from the hidden states of its answers, as in PPO. No reference, critic or rewards.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_mc.launch import run_program

if TYPE_CHECKING:
    from rlhf_mc.config import Settings
    from rlhf_mc.stages.start import Run


def heads(settings: Settings) -> None:
    """Collective over all ranks: the whole program. With rollout.placement=separate the last ranks only run engines."""
    # Imported here, after the settings were checked: vLLM and megatron-core take many seconds.
    from rlhf_mc.parallel.job import Job

    job = Job.of(os.environ, settings.rollout.engine_ranks)
    if job.has_engine_only:
        from rlhf_mc.stages.serve import serve

        serve(settings, job)
        sys.exit(0)  # not by way of leaving megatron's world, in which this rank never was

    from rlhf_mc.stages.make_experience import make_samples
    from rlhf_mc.stages.metrics import run_metrics
    from rlhf_mc.stages.start import start_ppo
    from rlhf_mc.stages.sync_weights import sync_weights
    from rlhf_mc.tracking import sampling_metrics

    with start_ppo(settings, job) as run:
        learned: list[dict[str, float]] = []
        for iteration in range(settings.trainer.iterations):
            metrics = sync_weights(run)
            rollout, logprobs = make_samples(run, iteration)
            learned.append(_train(run, iteration))
            metrics |= learned[-1] | sampling_metrics(rollout, logprobs) | run_metrics(run, rollout)
            run.tracker.log(iteration, metrics)
        _finish(run, learned)


def _train(run: Run, iteration: int) -> dict[str, float]:
    """Collective over all ranks. The optimizer steps of one iteration; medusa/... metrics."""
    from rlhf_mc.models.role import Role
    from rlhf_mc.offload import TRAINING, Part, Visit
    from rlhf_mc.stages.train import train_draft_heads

    with run.residency.on_device(Role.ACTOR, Part.PARAMS, beside=Visit(Role.MEDUSA, TRAINING)):
        metrics = train_draft_heads(run, iteration)
    run.weight_version += 1
    return metrics


def _finish(run: Run, learned: list[dict[str, float]]) -> None:
    """Collective over all ranks. Saves the heads, and compares the first rollout with the last; learned: metrics of each."""
    from rlhf_mc.models.role import Role
    from rlhf_mc.offload import Part
    from rlhf_mc.stages.draft_heads import save_beside
    from rlhf_mc.tracking import Comparison

    output = Path(run.settings.trainer.output_dir)
    with run.clock.stage("save"), run.residency.on_device(Role.MEDUSA, Part.PARAMS):
        save_beside(output, run.drafter, run.actor)
    if learned:
        names = [f"medusa/head_{k}/accuracy" for k in range(1, run.drafter.shape.num_heads + 1)]
        rows = [Comparison(name, learned[0][name], learned[-1][name]) for name in ("medusa/loss", *names)]
        run.tracker.before_and_after("First and last rollout, each before its update", rows)
    run.tracker.say(f"the actor stays as it is in {run.settings.actor.path}, the draft heads are in {(output / 'medusa').resolve()}")


if __name__ == "__main__":
    run_program("heads", heads)

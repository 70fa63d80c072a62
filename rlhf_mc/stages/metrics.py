"""What is logged of an iteration beside the losses: rollout, offload, time and memory."""

from __future__ import annotations

from rlhf_mc.batch import Experience, RolloutBatch
from rlhf_mc.pipeline.generation import load_metrics
from rlhf_mc.stages.start import Run
from rlhf_mc.tracking import overlap_of, rollout_metrics


def iteration_metrics(run: Run, experience: Experience) -> dict[str, float]:
    """verl's names where verl has one; closes the clock's and the ledger's iteration."""
    return rollout_metrics(experience) | {"actor/kl_coef": run.kl.coef} | run_metrics(run, experience.rollout)


def run_metrics(run: Run, rollout: RolloutBatch) -> dict[str, float]:
    """What the iteration with this rollout took; closes the clock's and the ledger's iteration."""
    metrics = run.residency.ledger.metrics()
    if run.sampler is not None:
        metrics |= load_metrics(run.loads)
        metrics |= run.drafting.metrics()
    if run.trace.enabled:
        metrics |= overlap_of(run.trace.iteration_spans()).metrics()
    num_devices = run.world.size + run.settings.rollout.engine_ranks
    return metrics | run.clock.metrics(int(rollout.lengths.sum()), num_devices)

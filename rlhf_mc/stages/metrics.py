"""What is logged of an iteration beside the losses: rollout, offload, time and memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlhf_mc.batch import Experience, RolloutBatch
from rlhf_mc.parallel.world import World
from rlhf_mc.pipeline.generation import load_metrics
from rlhf_mc.stages.start import Run
from rlhf_mc.tracking import overlap_of, rollout_metrics


def iteration_metrics(run: Run, experience: Experience) -> dict[str, float]:
    """Collective over all ranks. verl's names where verl has one; closes the clock's and the ledger's iteration."""
    return rollout_metrics(experience) | {"actor/kl_coef": run.kl.coef} | run_metrics(run, experience.rollout)


def run_metrics(run: Run, rollout: RolloutBatch) -> dict[str, float]:
    """Collective over all ranks. What the iteration with this rollout took; closes the clock's and the ledger's iteration."""
    metrics = run.residency.ledger.metrics()
    if run.sampler is not None:
        metrics |= load_metrics(run.loads)
        metrics |= run.drafting.metrics()
    if run.trace.enabled:
        metrics |= overlap_of(run.trace.iteration_spans()).metrics()
    num_devices = run.world.size + run.settings.rollout.engine_ranks
    times = run.clock.metrics(int(rollout.lengths.sum()), num_devices)
    return metrics | times | straggler_metrics(run.world, times)


def straggler_metrics(world: World, metrics: Mapping[str, float]) -> dict[str, float]:
    """Collective over all ranks. straggler/STAGE of each timing_s/STAGE: its longest time on a rank over the mean of all ranks.

    In a stage that all ranks leave together, the slow one shows in that it waits least; see the traces then.
    """
    names = [name for name in metrics if name.startswith("timing_s/")]
    of_ranks = torch.tensor(world.from_everyone([metrics[name] for name in names]), dtype=torch.float64)
    ratios = of_ranks.max(dim=0).values / of_ranks.mean(dim=0).clamp(min=1e-9)
    return {f"straggler/{name.removeprefix('timing_s/')}": ratio for name, ratio in zip(names, ratios.tolist(), strict=True)}

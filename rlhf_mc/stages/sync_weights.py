"""Sync weights: the actor's params and its draft heads', from the trainer's shards into the engines, and the proof that they are there."""

from __future__ import annotations

import time

from torch import Tensor

from rlhf_mc.models.passes import score
from rlhf_mc.models.role import Role
from rlhf_mc.offload import Part, Visit
from rlhf_mc.stages.start import Run

# Mean difference of the probe's log-probs, engine against trainer, that rounding explains: other kernels, another order of sums.
# Measured: 1e-6 in fp32, 0.09 in bf16 (SmolLM2-135M, of log-probs down to -22). A weight in a wrong place makes it some units.
PROBE_BOUNDS = {"fp32": 1e-4, "bf16": 0.3}


class SyncError(RuntimeError):
    """The engine does not compute what the trainer computes. The message says where and by how much."""


def sync_weights(run: Run) -> dict[str, float]:
    """Collective over all ranks. Afterwards the engines hold the actor's present weights, their caches are empty, and the trainer
    is off the device where it shares one with an engine.

    The order matters on a shared GPU: weights wake first, then the trainer leaves, then the KV cache takes the memory. Checksums
    prove that each weight arrived, the probe that it came to the right place. Raises ReshardError or SyncError on every rank.
    """
    with run.clock.stage("sync_weights"):
        run.sampler.wake_weights()
        heads = Visit(Role.MEDUSA, Part.PARAMS) if run.drafter is not None else None
        with run.residency.on_device(Role.ACTOR, Part.PARAMS, beside=heads):
            run.sampler.sync(weights(run), run.weight_version)
            start = time.perf_counter()
            expected = score(run.actor, run.sampler.probe, "predicted", run.settings.actor.scoring_micro_batch)
            run.probe_seconds = time.perf_counter() - start
        with run.device_for_sampler():
            run.sampler.wake_kv_cache()
        difference = prove(run, expected)
    plan = run.sampler.plan
    return {
        "sync/received_bytes": float(max(plan.received)),
        "sync/bound_bytes": plan.bound,
        "sync/probe_difference": difference,
    }


def weights(run: Run) -> dict[str, Tensor]:
    """This rank's shard of all that the engines take, by the trainer's names. Raises RuntimeError where it is not on the device."""
    run.actor.check_present("params")
    params = run.actor.params()
    if run.drafter is not None:
        run.drafter.check_present("params")
        params |= run.drafter.params()
    return params


def prove(run: Run, expected: Tensor) -> float:
    """Collective over all ranks. The mean difference of the probe's log-probs, against the trainer's, on the engine rank where it is largest.

    Raises SyncError on every rank where it exceeds the bound.
    """
    found = run.sampler.logprobs(run.sampler.probe.tokens.tolist(), run.weight_version)
    differences = (found - expected).abs().mean(dim=1)
    worst, bound = float(differences.max()), PROBE_BOUNDS[run.settings.trainer.dtype]
    if not worst <= bound:
        raise SyncError(
            f"weight sync {run.weight_version}: log-probs of the probe differ by {worst:.3g} on average between engine and trainer on engine "
            f"rank {int(differences.argmax())}, more than the {bound:g} that rounding explains in {run.settings.trainer.dtype}; the "
            "engine computes with other weights, or another model: check that vLLM supports actor.path as it is"
        )
    return worst

"""Sync weights: the actor's params, from the trainer's shards into the engine of every rank."""

from __future__ import annotations

from rlhf_mc.models.role import Role
from rlhf_mc.offload import Part
from rlhf_mc.stages.start import Run


def sync_weights(run: Run) -> None:
    """Collective over all ranks. Afterwards the engine holds the actor's present weights, its caches are empty, and the trainer is off.

    The order matters on a GPU: weights wake first, then the trainer leaves, then the KV cache takes the memory.
    """
    with run.clock.stage("sync_weights"):
        run.engine.sleep()
        run.engine.wake_weights()
        with run.residency.on_device(Role.ACTOR, Part.PARAMS):
            run.engine.load_weights(run.actor.export(), run.weight_version)
        with run.residency.nobody_on_device():
            run.engine.wake_kv_cache()

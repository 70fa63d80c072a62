"""Checkpoint: a run is written down after an iteration, and goes on from there bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rlhf_mc.checkpoint import FileRecord, Saving, settings_record
from rlhf_mc.checkpoint.generators import generator_states, read_generators, write_generators
from rlhf_mc.checkpoint.layout import Layout
from rlhf_mc.checkpoint.roles import part_of, read_role
from rlhf_mc.models.role import Role
from rlhf_mc.offload.text import readable
from rlhf_mc.pipeline.dispatch import ResponseLengths
from rlhf_mc.pipeline.schedule import Costs
from rlhf_mc.stages.dump import finish_dump
from rlhf_mc.stages.evaluate import evaluate
from rlhf_mc.stages.start import Boundary, Run, checkpoints_of


def begin(run: Run) -> dict[str, float]:
    """Collective over all ranks. Puts the run where its checkpoint left it, if it goes on from one; the evaluation before iteration 0."""
    if run.origin.snapshot is None:
        run.before = evaluate(run, iteration=0)
    else:
        with run.clock.stage("load_checkpoint"):
            _restore(run, run.origin.snapshot.directory, run.origin.snapshot.record)
    return run.before


def save_checkpoint(run: Run, done: int, metrics: Mapping[str, float]) -> None:
    """Collective over all ranks. After `done` iterations: the run may be left here; if it is time, a checkpoint is begun, which is
    written beside the next rollout.

    What the run has logged and dumped of these iterations is on the disk before. metrics: of the last of them.
    Raises CheckpointError as finish_checkpoint does, StopAsked as Run.safe_point does.
    """
    trainer = run.settings.trainer
    run.done, run.updated = done, False
    if trainer.save_every:
        run.boundary = _boundary(run, metrics)
        if done % trainer.save_every == 0:
            _begin_saving(run)
    run.safe_point()


def save_last_boundary(run: Run) -> int:
    """Collective over all ranks, the device free of roles in use. The iterations of the newest checkpoint, which is whole by now; 0: none.

    Of the last completed iteration, where the run saves at all: what an iteration that was begun has changed is in no checkpoint.
    """
    if run.boundary is not None and run.saved != run.done:
        _begin_saving(run)
    finish_dump(run)
    finish_checkpoint(run)
    return run.saved


def _begin_saving(run: Run) -> None:
    """Collective over all ranks. Of the last boundary."""
    finish_dump(run)
    finish_checkpoint(run)
    with run.clock.stage("save_checkpoint"):
        parts = [part_of(run.residency, role) for role in trained_roles(run)]
        states, trace, rank = run.boundary.generators, run.trace, run.world.rank

        def write(directory: Path) -> list[FileRecord]:
            with trace.span("checkpoint", track="disk"):
                files = [file for part in parts for file in part.write(directory)]
                return [*files, write_generators(states, rank, directory)]

        record = _record(run, run.boundary)
        run.saving = Saving(run.world, checkpoints_of(run.settings), run.done, record, write, run.checkpoint_writer)
        run.saved = run.done


def finish_checkpoint(run: Run) -> None:
    """Collective over all ranks. The checkpoint that was begun is whole and found from here on; older ones go, see trainer.keep_last and keep_best.

    Comes before the next update, which changes what is being written. Raises CheckpointError on every rank where one could not write.
    """
    if run.saving is None:
        return
    trainer = run.settings.trainer
    with run.clock.stage("finish_checkpoint"):
        num_bytes = run.saving.publish(trainer.keep_last, trainer.keep_best, trainer.best_by)
    run.tracker.say(f"checkpoint after {run.saving.iteration} iterations: {readable(num_bytes)}")
    run.saving = None


def trained_roles(run: Run) -> list[Role]:
    """Whose weights change."""
    return run.trained + ([Role.MEDUSA] if run.trained and run.trains_heads else [])


def _boundary(run: Run, metrics: Mapping[str, float]) -> Boundary:
    return Boundary(
        weight_version=run.weight_version,
        kl_coef=run.kl.coef,
        lengths=run.lengths.copy(),
        drafting=run.drafting.state(),
        costs=run.costs,
        generators=generator_states(run.world),
        metrics={name: float(value) for name, value in metrics.items() if math.isfinite(value)},
    )


def _record(run: Run, boundary: Boundary) -> dict[str, Any]:
    """What is alike on all ranks. Data order, rates and seeds are functions of the iteration, and need nothing."""
    return {
        "settings": settings_record(run.settings),
        "layout": Layout.of(run.settings, run.world.size).record(),
        "identity": run.identity,
        "wandb_run_id": run.tracker.wandb_run_id,
        "weight_version": boundary.weight_version,
        "kl_coef": boundary.kl_coef,
        "lengths": boundary.lengths.state(),
        "drafting": boundary.drafting,
        "costs": None if boundary.costs is None else asdict(boundary.costs),
        "before": run.before,
        "metrics": boundary.metrics,
    }


def _restore(run: Run, directory: Path, record: dict[str, Any]) -> None:
    """Collective over all ranks. The opposite of `save_checkpoint`."""
    saved, present = Layout(**record["layout"]), Layout.of(run.settings, run.world.size)
    if saved != present:
        run.tracker.say(f"from another layout, so equal within rounding only: saved on {saved}; now {present}")
    for role in trained_roles(run):
        read_role(run.residency, role, directory, saved)
    run.residency.all_off()
    run.weight_version = record["weight_version"]
    run.kl = replace(run.kl, coef=record["kl_coef"])
    run.lengths = ResponseLengths.from_state(record["lengths"])
    run.drafting.restore(record["drafting"])
    run.costs = None if record["costs"] is None else Costs(**record["costs"])
    run.before = record["before"]
    read_generators(run.world, directory, run.world.rank if saved == present else 0)

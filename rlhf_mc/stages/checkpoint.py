"""Checkpoint: a run is written down after an iteration, and goes on from there bit for bit."""

from __future__ import annotations

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
from rlhf_mc.stages.start import Run, checkpoints_of


def begin(run: Run) -> dict[str, float]:
    """Collective over all ranks. Puts the run where its checkpoint left it, if it goes on from one; the evaluation before iteration 0."""
    if run.origin.snapshot is None:
        run.before = evaluate(run, iteration=0)
    else:
        with run.clock.stage("load_checkpoint"):
            _restore(run, run.origin.snapshot.directory, run.origin.snapshot.record)
    return run.before


def save_checkpoint(run: Run, done: int) -> None:
    """Collective over all ranks. After `done` iterations, if it is time: begins a checkpoint, which is written beside the next rollout.

    What the run has logged and dumped of these iterations is on the disk before. Raises CheckpointError as finish_checkpoint does.
    """
    trainer = run.settings.trainer
    if not trainer.save_every or done % trainer.save_every:
        return
    finish_dump(run)
    finish_checkpoint(run)
    with run.clock.stage("save_checkpoint"):
        parts = [part_of(run.residency, role) for role in trained_roles(run)]
        states, trace, rank = generator_states(run.world), run.trace, run.world.rank

        def write(directory: Path) -> list[FileRecord]:
            with trace.span("checkpoint", track="disk"):
                files = [file for part in parts for file in part.write(directory)]
                return [*files, write_generators(states, rank, directory)]

        run.saving = Saving(run.world, checkpoints_of(run.settings), done, _record(run), write, run.checkpoint_writer)


def finish_checkpoint(run: Run) -> None:
    """Collective over all ranks. The checkpoint that was begun is whole and found from here on; older ones than trainer.keep_last go.

    Comes before the next update, which changes what is being written. Raises CheckpointError on every rank where one could not write.
    """
    if run.saving is None:
        return
    with run.clock.stage("finish_checkpoint"):
        num_bytes = run.saving.publish(run.settings.trainer.keep_last)
    run.tracker.say(f"checkpoint after {run.saving.iteration} iterations: {readable(num_bytes)}")
    run.saving = None


def trained_roles(run: Run) -> list[Role]:
    """Whose weights change."""
    if not run.settings.trainer.trains:
        return []
    return [Role.ACTOR, Role.CRITIC] + ([Role.MEDUSA] if run.trains_heads else [])


def _record(run: Run) -> dict[str, Any]:
    """What is alike on all ranks. Data order, rates and seeds are functions of the iteration, and need nothing."""
    return {
        "settings": settings_record(run.settings),
        "layout": Layout.of(run.settings, run.world.size).record(),
        "identity": run.identity,
        "wandb_run_id": run.tracker.wandb_run_id,
        "weight_version": run.weight_version,
        "kl_coef": run.kl.coef,
        "lengths": run.lengths.state(),
        "drafting": run.drafting.state(),
        "costs": None if run.costs is None else asdict(run.costs),
        "before": run.before,
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

"""Export: what a run trains, as directories that other programs read: actor and critic for transformers, draft heads for vLLM."""

from __future__ import annotations

import shutil
from pathlib import Path

from rlhf_mc.models.role import Role
from rlhf_mc.models.whole_directory import SaveError, aside_path, begin_directory, naming, publish_directory
from rlhf_mc.offload import EMPTY, Part, Visit
from rlhf_mc.stages.start import Run


def export(run: Run, done: int) -> None:
    """Collective over all ranks. After `done` iterations: if it is time, output_dir/exports/`done`, which is whole or not there.

    It comes before save_checkpoint: where there is a checkpoint of these iterations, there is the export, too. One that an earlier
    attempt of the run made is made again. Raises SaveError on every rank where rank 0 cannot write.
    """
    trainer = run.settings.trainer
    if not trainer.export_every or done % trainer.export_every:
        return
    target = Path(trainer.output_dir, "exports", f"{done:06d}")
    run.world.together(lambda: _begin(target) if run.world.rank == 0 else None, SaveError)
    try:
        save_models(run, aside_path(target))
    except SaveError:
        if run.world.rank == 0:
            shutil.rmtree(aside_path(target), ignore_errors=True)
        raise
    run.world.together(lambda: publish_directory(target) if run.world.rank == 0 else None, SaveError)
    run.tracker.say(f"exported after {done} iterations: {target}")


def save_models(run: Run, directory: Path) -> None:
    """Collective over all ranks. `directory`/actor, and /critic if there is one (Hugging Face), /medusa (vLLM's layout); nothing where none is trained.

    The actor comes first, which is on the device after an update; with its draft heads, as at a weight sync. Raises SaveError on every
    rank where rank 0 cannot write.
    """
    if not run.settings.trainer.trains:
        return
    heads = Visit(Role.MEDUSA, Part.PARAMS) if run.drafter is not None else None
    following = Visit(Role.CRITIC, Part.PARAMS) if Role.CRITIC in run.roles else EMPTY
    with run.clock.stage("save"), run.residency.on_device(Role.ACTOR, Part.PARAMS, following, beside=heads):
        run.actor.save(str(directory / Role.ACTOR.value))
        if run.drafter is not None:
            run.drafter.save(directory / Role.MEDUSA.value, run.actor.shape, directory / Role.ACTOR.value)
    if Role.CRITIC in run.roles:
        with run.clock.stage("save"), run.residency.on_device(Role.CRITIC, Part.PARAMS, EMPTY):
            run.critic.save(str(directory / Role.CRITIC.value))


def _begin(target: Path) -> None:
    """An empty directory to write `target` in; what earlier attempts left half written beside it goes. Raises SaveError."""
    with naming(target):
        for leftover in target.parent.glob("*.partial"):
            shutil.rmtree(leftover)
    begin_directory(target)

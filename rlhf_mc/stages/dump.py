"""Dump: the experience of an iteration goes to its file, beside the update that uses it."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from rlhf_mc.batch import Experience
from rlhf_mc.rollout_files import Header, RolloutWriteError, conditions, write_rollout
from rlhf_mc.stages.start import Run

_BAD_BATCHES = 10


def dump(run: Run, experience: Experience, iteration: int) -> None:
    """Collective over all ranks. Rank 0 starts to write the file of this iteration; the one before is complete by then.

    Nothing where the settings ask for no dumps.
    """
    if not run.settings.dumps:
        return
    finish_dump(run)
    if run.world.rank == 0:
        header = Header(iteration, len(experience), run.kl.coef, conditions(run.settings))
        path = run.settings.dump_file(iteration)

        def write() -> None:
            with run.trace.span("dump", track="disk"):
                write_rollout(path, header, experience, run.tokenizer.decode)

        run.dump_writer.submit(write)


def keep_bad_batch(run: Run, experience: Experience, iteration: int) -> str:
    """No collective. Rank 0 writes the experience that an update was skipped for, once an iteration, the first ten of them.

    Where it is, or why there is none: what cannot be written is no reason to stop.
    """
    path = Path(run.settings.trainer.output_dir, "bad_updates", run.settings.dump_file(iteration).name)
    if run.world.rank != 0 or path.exists():
        return str(path)
    if path.parent.is_dir() and len(list(path.parent.iterdir())) >= _BAD_BATCHES:
        return f"no file, for there are {_BAD_BATCHES} in {path.parent}"
    header = Header(iteration, len(experience), run.kl.coef, conditions(run.settings))
    try:
        write_rollout(path, header, experience, run.tokenizer.decode)
    except RolloutWriteError as error:
        return f"no file: {error}"
    return str(path)


def finish_dump(run: Run) -> None:
    """Collective over all ranks. Waits until rank 0's file is complete; where it failed, every rank raises RolloutWriteError."""
    if not run.settings.dumps:
        return
    with run.clock.stage("dump"):
        error = run.dump_writer.wait()
        fault = [None if error is None else f"rank 0: {error}"]
        if run.world.size > 1:
            dist.broadcast_object_list(fault, src=0, group=run.world.everyone)
    if fault[0] is not None:
        raise RolloutWriteError(fault[0]) from error

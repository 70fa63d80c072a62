"""Dump: the experience of an iteration goes to its file, beside the update that uses it."""

from __future__ import annotations

import torch.distributed as dist

from rlhf_mc.batch import Experience
from rlhf_mc.rollout_files import Header, RolloutWriteError, conditions, write_rollout
from rlhf_mc.stages.start import Run


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

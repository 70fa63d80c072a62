"""Leave: where in an iteration a run may be left, what it saves then, and what an error says of the place where it came."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_mc.launch import end_with
from rlhf_mc.reliability import StopAsked, Stopped
from rlhf_mc.reliability.statuses import STOPPED
from rlhf_mc.stages.checkpoint import save_last_boundary
from rlhf_mc.stages.start import Run, checkpoints_of

_SECONDS_TO_UNWIND = 4.0


@contextmanager
def leaves_when_asked(run: Run) -> Iterator[None]:
    """Collective over all ranks. Around the whole work of a run: where it is asked to stop, the checkpoint of the last completed
    iteration is written, and Stopped raised on all ranks.

    An error gets the rank, iteration and stage as a note; where closing the run then hangs, the rank ends all the same.
    """
    try:
        yield
    except StopAsked:
        run.tracker.say(_left(run))
        run.world.any_rank(False)  # all ranks have come here, so that none takes another one for dead
        run.stop.leaves_with(STOPPED)
        if run.bridge is not None:
            run.bridge.say_over()
        raise Stopped from None
    except Exception as error:
        error.add_note(f"on rank {run.world.rank}, in iteration {run.done}, stage {run.clock.failed_in}")
        closing = threading.Timer(_SECONDS_TO_UNWIND, end_with, args=[error])
        closing.daemon = True
        closing.start()
        raise
    run.world.any_rank(False)
    run.stop.leaves_with(0)


def _left(run: Run) -> str:
    """Collective over all ranks. Saves what is to be saved; what was saved, and how to go on."""
    run.tracker.say(f"asked to stop: {', '.join(_askers(run))}; leaving after {run.done} iterations")
    if run.sampler is not None:
        run.sampler.sleep()
    saved = save_last_boundary(run)
    if saved:
        return f"stopped: the checkpoint after {saved} iterations is in {checkpoints_of(run.settings)}; the same command goes on from there"
    why = "no iteration was done" if run.settings.trainer.save_every else "trainer.save_every is 0"
    return f"stopped: there is no checkpoint, for {why}; the same command begins anew"


def _askers(run: Run) -> list[str]:
    names = run.world.from_everyone(run.stop.name)
    return [f"{name} on rank {rank}" for rank, name in enumerate(names) if name]

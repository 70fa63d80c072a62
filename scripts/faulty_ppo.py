"""PPO with faults, put in from outside the program: scripts/faults.py and the tests start it as they would rlhf_mc.train.

    FAULTS='[{"stage": "update_critic", "iteration": 1, "rank": 0, "action": "kill"}]' torchrun ... -m scripts.faulty_ppo ...

stage: as the clock names it; the fault comes when it first begins in that iteration.  iteration: of this attempt, from 0.
rank: of the job.  action: one of ACTIONS.  times: how often a number is spoilt (1).
SLOW_DISK=0.25: every flush, rename and removal takes so many seconds more, on all ranks.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

import rlhf_mc.stages.train as train_stage
from rlhf_mc.launch import run_program
from rlhf_mc.models.loss import Loss, LossSum
from rlhf_mc.tracking import StageClock
from rlhf_mc.train import ppo

_FOR_EVER = 1e6
_FULL_BYTES = 4096

FAULTS = [fault for fault in json.loads(os.environ.get("FAULTS", "[]")) if fault["rank"] == int(os.environ["RANK"])]
torchrun = os.getppid()


def end_torchrun() -> None:
    """As where a host loses its power: the ranks go too, for their parent is gone."""
    os.kill(torchrun, signal.SIGKILL)


def fill_disk() -> None:
    """No file may grow beyond some kilobytes from now on: to a program that is a full disk, but for the number of the error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def fail() -> None:
    raise ZeroDivisionError("the fault that was put in")


def slow_disk(seconds: float) -> None:
    """Waits before each step that makes something durable or changes a name."""
    for module, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (shutil, "rmtree")):
        setattr(module, name, _late(getattr(module, name), seconds))


def _late(real: Callable, seconds: float) -> Callable:
    def work(*arguments, **named):
        time.sleep(seconds)
        return real(*arguments, **named)

    return work


ACTIONS: dict[str, Callable[[], None]] = {
    "term": lambda: os.kill(torchrun, signal.SIGTERM),
    "usr1": lambda: os.kill(torchrun, signal.SIGUSR1),
    "term one rank": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill torchrun": end_torchrun,
    "sleep": lambda: time.sleep(_FOR_EVER),
    "fail": fail,
    "full disk": fill_disk,
}


def spoil_gradient(times: int) -> None:
    """One element of this rank's gradients is NaN in its next updates."""
    real, left = train_stage.update, [times]

    def update(model, *arguments):
        if left[0]:
            left[0] -= 1
            model.buffers[0].grad_data.view(-1)[0] = torch.nan
        return real(model, *arguments)

    train_stage.update = update


def spoil_loss(times: int) -> None:
    """The critic's loss is NaN on this rank in its next updates."""
    real, left = train_stage.critic_loss, [times]

    def critic_loss(*arguments) -> Loss:
        loss = real(*arguments)
        if not left[0]:
            return loss
        left[0] -= 1

        def of(values, packed) -> LossSum:
            sums = loss.of(values, packed)
            return LossSum(sums.loss * torch.nan, {name: total * torch.nan for name, total in sums.sums.items()})

        return Loss(loss.names, of)

    train_stage.critic_loss = critic_loss


SPOILS: dict[str, Callable[[int], None]] = {"nan gradient": spoil_gradient, "nan loss": spoil_loss}


class FaultyClock:
    """Puts each fault in when its stage begins in its iteration."""

    def __init__(self) -> None:
        self._real_stage, self._real_metrics = StageClock.stage, StageClock.metrics
        self._iteration, self._waiting = 0, list(FAULTS)

    def put_in(self) -> None:
        """From now on clocks have the faults."""
        this = self

        def stage(clock: StageClock, name: str) -> AbstractContextManager[None]:
            entered = this._real_stage(clock, name)
            return _Begun(entered, lambda: this._begun(name))

        def metrics(clock: StageClock, *arguments, **named) -> dict[str, float]:
            this._iteration += 1
            return this._real_metrics(clock, *arguments, **named)

        StageClock.stage, StageClock.metrics = stage, metrics

    def _begun(self, name: str) -> None:
        for fault in [f for f in self._waiting if (f["stage"], f["iteration"]) == (name, self._iteration)]:
            self._waiting.remove(fault)
            action = fault["action"]
            print(f"fault: {action} on rank {fault['rank']}, in {name}", file=sys.stderr, flush=True)
            if action in SPOILS:
                SPOILS[action](fault.get("times", 1))
            else:
                ACTIONS[action]()


class _Begun:
    def __init__(self, stage: AbstractContextManager[None], begun: Callable[[], None]) -> None:
        self._stage, self._begun = stage, begun

    def __enter__(self) -> None:
        self._stage.__enter__()
        try:
            self._begun()
        except BaseException:
            if not self._stage.__exit__(*sys.exc_info()):
                raise

    def __exit__(self, *error: object) -> bool | None:
        return self._stage.__exit__(*error)


if __name__ == "__main__":
    if FAULTS:
        FaultyClock().put_in()
    if "SLOW_DISK" in os.environ:
        slow_disk(float(os.environ["SLOW_DISK"]))
    run_program("train", ppo)

"""The process in which reward functions run: `python -m rlhf_mc.rewards.worker`, started by `process.py` only.

Standard input is a socket. The first message names the functions; then each request is one sample for one function,
and each answer its reward or its traceback. It ends when the socket closes or its parent dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_mc.rewards.confinement import Confinement
from rlhf_mc.rewards.interface import RewardSample, checked_reward, load_function
from rlhf_mc.rewards.protocol import receive, send

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Loads the functions, then answers requests until the parent is gone."""
    channel = _take_channel()
    _die_with_parent()
    try:
        _serve(channel)
    except EOFError:
        # Not sys.exit: a thread that a reward function left behind must not keep the process.
        os._exit(0)


def _take_channel() -> socket.socket:
    """Moves the socket away from standard input, where a reward function could read from it."""
    channel = socket.socket(fileno=os.dup(0))
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return channel


def _die_with_parent() -> None:
    """A killed trainer leaves no worker; and where memory runs out, the kernel takes the worker, not the trainer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        Path("/proc/self/oom_score_adj").write_text("1000")


def _serve(channel: socket.socket) -> None:
    setup = receive(channel)
    if os.getppid() != setup["parent"]:  # it died before prctl, which then sends no signal
        raise EOFError
    sys.path[:] = setup["sys_path"]
    try:
        Confinement(**setup["confinement"]).enter()
    except OSError as error:
        send(channel, {"refused": error.strerror})
        raise EOFError from error
    functions = []
    for wanted in setup["functions"]:
        try:
            functions.append(load_function(wanted["path"], wanted["arguments"]))
        except BaseException as error:
            send(channel, {"failed": wanted["path"], "report": _report(error)})
            raise EOFError from error
    send(channel, {"ready": True})
    while True:
        request = receive(channel)
        send(channel, _answer(functions[request["function"]], RewardSample(**request["sample"])))


def _answer(function: Callable[[RewardSample], Any], sample: RewardSample) -> dict[str, Any]:
    """{"reward": number or list} or {"fault": where and what, "report": traceback}. SystemExit is a fault as well."""
    try:
        return {"reward": checked_reward(function(sample), len(sample.response_ids))}
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return {"fault": f"{type(error).__name__} at {last.filename}:{last.lineno}", "report": _report(error)}


def _report(error: BaseException) -> str:
    """The traceback without this file's own frame, which would say nothing about the reward function."""
    frames = error.__traceback__.tb_next or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


if __name__ == "__main__":
    main()

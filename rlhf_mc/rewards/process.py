"""The parent's handle on one worker process: start, one call at a time with a deadline, kill, start again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import rlhf_mc.rewards
from rlhf_mc.config import RewardFunction
from rlhf_mc.rewards.confinement import Confinement
from rlhf_mc.rewards.interface import RewardError, RewardSample
from rlhf_mc.rewards.protocol import receive, send

IMPORT_TIMEOUT_SECONDS = 60.0


class Outcome(StrEnum):
    """What became of one sample at one function."""

    SCORED = "scored"
    ERROR = "error"
    TIMEOUT = "timeout"
    NOT_APPLICABLE = "not_applicable"


@dataclass(frozen=True)
class Call:
    """One sample at one function. `reward` is None unless scored.

    fault: what went wrong and where, equal for equal faults.  report: the traceback, or a sentence.
    seconds: what the call took in the worker, time in the queue not counted.
    """

    outcome: Outcome
    reward: float | list[float] | None = None
    fault: str = ""
    report: str = ""
    seconds: float = 0.0


class WorkerProcess:
    """One process that has every reward function loaded. Its methods belong to one thread; only `kill` to any."""

    def __init__(self, functions: list[RewardFunction], timeout_seconds: float, confinement: Confinement = Confinement()) -> None:
        self._functions = functions
        self._confinement = confinement
        self._timeout_seconds = timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._lock = threading.Lock()
        self._killed = False
        self._ready = False

    def start(self) -> None:
        """Starts the process and waits until it has imported every function; RewardError says which one failed."""
        self._spawn()
        self._wait_ready()

    def kill(self) -> None:
        """Ends the process for good, in the middle of a call if need be."""
        with self._lock:
            self._killed = True
            self._end_process()

    def close(self) -> None:
        """`kill`, and gives the socket back."""
        self.kill()
        if self._channel is not None:
            self._channel.close()

    def call(self, function: int, sample: RewardSample) -> Call:
        """Runs function number `function` on one sample. Whatever happens there, a fresh worker serves the next call."""
        if not self._ready:
            self._wait_ready()
        deadline = time.monotonic() + self._timeout_seconds
        try:
            self._send({"function": function, "sample": vars(sample)}, deadline)
            answer = receive(self._channel, deadline)
        except TimeoutError:
            self._spawn()
            return self._timed_out(function, sample)
        except EOFError:
            ending = self._ending()
            self._spawn()
            return Call(Outcome.ERROR, fault=ending, report=f"{ending} while it scored the response {sample.response[:200]!r}")
        if "fault" in answer:
            return Call(Outcome.ERROR, fault=answer["fault"], report=answer["report"])
        return Call(Outcome.SCORED, reward=answer["reward"])

    def _send(self, request: dict[str, Any], deadline: float) -> None:
        try:
            send(self._channel, request, deadline)
        except TypeError as error:
            fields = {name: type(value).__name__ for name, value in request["sample"]["row"].items()}
            raise RewardError(f"reward functions receive the dataset row as JSON; {error}. The row's fields: {fields}") from None

    def _spawn(self) -> None:
        """Ends the process that is there, if any, and starts another, without waiting for its imports."""
        with self._lock:
            self._end_process()
            if self._killed:
                raise RewardError("the reward pool is closed")
            if self._channel is not None:
                self._channel.close()
            self._channel, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-X", "faulthandler", "-m", "rlhf_mc.rewards.worker"],
                    stdin=theirs,
                    stdout=2,  # what a reward function prints is for people
                    env=_environment(),
                    start_new_session=True,  # one process group, killed whole, and out of reach of the terminal's Ctrl-C
                )
        self._ready = False
        self._import_deadline = time.monotonic() + IMPORT_TIMEOUT_SECONDS
        functions = [{"path": f.path, "arguments": f.arguments} for f in self._functions]
        setup = {
            "parent": os.getpid(),
            "sys_path": [p or os.getcwd() for p in sys.path],
            "confinement": asdict(self._confinement),
            "functions": functions,
        }
        with suppress(EOFError):  # a worker that died at once is reported by _wait_ready
            send(self._channel, setup, self._import_deadline)

    def _wait_ready(self) -> None:
        try:
            answer = receive(self._channel, self._import_deadline)
        except TimeoutError:
            paths = ", ".join(f.path for f in self._functions)
            raise RewardError(f"{paths} did not import within {IMPORT_TIMEOUT_SECONDS:g} s") from None
        except EOFError:
            raise RewardError(f"{self._ending()} while it imported the reward functions") from None
        if "refused" in answer:
            raise RewardError(answer["refused"])
        if "failed" in answer:
            raise RewardError(f"'{answer['failed']}' cannot be used:\n{answer['report']}")
        self._ready = True

    def _timed_out(self, function: int, sample: RewardSample) -> Call:
        fault = f"took longer than reward.timeout_seconds = {self._timeout_seconds:g}"
        report = f"{self._functions[function].label} {fault} on the response {sample.response[:200]!r}"
        return Call(Outcome.TIMEOUT, fault=fault, report=report)

    def _ending(self) -> str:
        """How the process ended that closed its channel. Killing what is dying already does not change its exit code."""
        with self._lock:
            code = self._end_process()
        if code is None:
            return "the worker process was stopped"
        name = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"the worker process ended {name}"

    def _end_process(self) -> int | None:
        """Kills the process group, with what the functions started there; the exit code, None if there was no process."""
        if self._process is None:
            return None
        # Before wait(), which would free the process id for another process.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._process = None
        return code


def _environment() -> dict[str, str]:
    """This process's environment, with the package importable wherever it was imported from."""
    package_root = str(Path(rlhf_mc.rewards.__file__).parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": package_root + (os.pathsep + inherited if inherited else "")}

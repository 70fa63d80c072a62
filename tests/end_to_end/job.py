"""A program of rlhf_mc on 2 ranks, seen from outside: started as the scripts start it, watched, killed, searched for leftovers.

Every process of a job carries a mark in its environment, which its children inherit: torchrun, ranks, reward workers, wandb.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_MARK = "RLHF_MC_TEST_JOB"
_START = 'source scripts/launch.sh && launch "$@"'


@dataclass(frozen=True)
class Process:
    """One process of a job, as /proc has it."""

    pid: int
    parent: int
    command: str
    environment: dict[str, str]


@dataclass
class Job:
    """A running or finished job; `output` grows while it runs."""

    process: subprocess.Popen
    mark: str
    log: Path
    _shared_memory: set[str] = field(default_factory=set)

    @property
    def output(self) -> str:
        """Standard output and error of all its processes."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout_seconds: float) -> int:
        """The exit status of the launcher. A job that is not done in time is killed, and the test fails with its output."""
        self._watch(lambda: self.process.poll() is not None, "not done", timeout_seconds)
        return self.process.returncode

    def wait_for(self, text: str, timeout_seconds: float) -> None:
        """Until `text` is in the output; the test fails where the job ends first, or the time is over."""
        self._watch(lambda: text in self.output or self.process.poll() is not None, f"no {text!r}", timeout_seconds)
        assert text in self.output, f"ended before {text!r}:\n{self.output}"

    def _watch(self, done: Callable[[], bool], fault: str, timeout_seconds: float) -> None:
        """Until `done`; notes on the way which files in shared memory the job uses."""
        deadline = time.monotonic() + timeout_seconds
        while not done():
            for process in self.processes():
                self._shared_memory |= _shared_memory_of(process.pid)
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"{fault} after {timeout_seconds:g} s:\n{self.output}")
            time.sleep(0.1)

    def left_in_shared_memory(self) -> list[str]:
        """The files in shared memory that the job was seen to use, and that are still there."""
        return sorted(name for name in self._shared_memory if os.path.exists(name))

    def processes(self) -> list[Process]:
        """All that are alive and carry the mark, but for the shell that the test itself started."""
        return [p for p in _processes() if p.environment.get(_MARK) == self.mark and p.pid != self.process.pid]

    def torchrun(self) -> Process:
        """The launcher of the ranks."""
        return next(p for p in self.processes() if "LOCAL_RANK" not in p.environment)

    def rank(self, rank: int) -> Process:
        """The process of a rank, not the workers that inherit its environment."""
        torchrun = self.torchrun().pid
        return next(p for p in self.processes() if p.parent == torchrun and p.environment.get("RANK") == str(rank))

    def seconds_until_gone(self, timeout_seconds: float) -> float:
        """Until no process of the job is left; the test fails where some are after `timeout_seconds`."""
        start = time.monotonic()
        while left := self.processes():
            if time.monotonic() - start > timeout_seconds:
                names = [f"{p.pid} {p.command}" for p in left]
                self.kill()
                raise AssertionError(f"alive after {timeout_seconds:g} s: {names}\n{self.output}")
            time.sleep(0.05)
        return time.monotonic() - start

    def kill(self) -> None:
        """Ends all that is left of it."""
        for process in self.processes():
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.kill()
        self.process.wait()


def start(log: Path, module: str, arguments: Iterable[str], ranks: int = 2, environment: Mapping[str, str] = {}) -> Job:
    """`module` under torchrun by scripts/launch.sh. OMP_NUM_THREADS is 1 where the caller has not set it."""
    mark = uuid.uuid4().hex
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    paths = f"{Path(sys.executable).parent}{os.pathsep}{inherited['PATH']}"
    env = {"OMP_NUM_THREADS": "1"} | inherited | {"PATH": paths, "NPROC": str(ranks), _MARK: mark} | dict(environment)
    command = ["bash", "-c", _START, "launch", module, *arguments]
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    return Job(process, mark, log)


def _processes() -> Iterable[Process]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            pairs = (pair.partition("=") for pair in (entry / "environ").read_text(errors="replace").split("\0"))
            command = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
            # The name of the program, in parentheses, may hold spaces; the state comes after it, then the parent.
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, PermissionError):
            continue
        if state != "Z":
            yield Process(int(entry.name), int(parent), command, {name: value for name, _, value in pairs})


def _shared_memory_of(pid: int) -> set[str]:
    """Files in shared memory that a process has open or mapped and that still have a name."""
    entry = Path("/proc", str(pid))
    try:
        held = [line.partition("/dev/shm/")[1:] for line in (entry / "maps").read_text().splitlines()]
        held += [os.readlink(link).partition("/dev/shm/")[1:] for link in (entry / "fd").iterdir()]
    except OSError:
        return set()
    return {directory + name for directory, name in held if directory and not name.endswith(" (deleted)")}

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")
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
    started: float = field(default_factory=time.monotonic)

    @property
    def output(self) -> str:
        """Standard output and error of all its processes."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout_seconds: float) -> int:
        """The exit status of the launcher. A job that is not done in time is killed, and the test fails with its output."""
        try:
            return self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not done after {timeout_seconds:g} s:\n{self.output}") from None

    def wait_for(self, text: str, timeout_seconds: float) -> None:
        """Until `text` is in the output; the test fails where the job ends first, or the time is over."""
        deadline = time.monotonic() + timeout_seconds
        while text not in self.output:
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} after {timeout_seconds:g} s:\n{self.output}"
            time.sleep(0.05)

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


def files_of_nobody(since: float) -> list[str]:
    """Files in shared memory that are newer than `since` (time.time()) and that no living process has open or mapped."""
    new = {str(path) for path in SHARED_MEMORY.iterdir() if path.lstat().st_mtime >= since}
    if not new:
        return []
    held = set()
    for entry in Path("/proc").iterdir():
        try:
            held |= {line.rpartition(" ")[2] for line in (entry / "maps").read_text().splitlines() if str(SHARED_MEMORY) in line}
            held |= {os.readlink(link) for link in (entry / "fd").iterdir()}
        except OSError:
            continue
    return sorted(new - held)

"""A pool of ranks for tests: worker processes that stay, forked from one that has imported megatron, which takes seconds.

    def test_it(ranks):                                           # the fixture of tests/conftest.py, one for the session
        answers = ranks.run("models.on_ranks:score_batch", Layout(tensor=2), directory=path, batch=batch)

calls `score_batch(world, directory=path, batch=batch)` on the first two workers, each with its `World` of a TP2 grid (gloo,
CPU), and returns what it returned, one item a rank. The module is found from tests/ and is imported on the ranks only;
arguments and results cross by pickle. Workers start when first needed, and die with the process that made them. Process
groups are kept while the layout stays the same; so tests that are ordered by layout are faster. After some layouts the workers
are replaced by new ones. All generators are seeded alike before each call.

An exception on a rank is raised here as RankError with the traceback of the first rank that failed. Ranks that then hang
in a collective, and ranks that are not done by `timeout_seconds`, are killed; the error says where each of them was, and the
next call starts new workers. What keeps state in a process for good (an engine) belongs in a program of its own under
torchrun, not here.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import itertools
import os
import pickle
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_IMPORTS = "rlhf_mc.models.passes"
_START_SECONDS = 200.0
_AFTER_ERROR_SECONDS = 5.0
_WORLDS = 8  # that a worker joins: each leaves gloo's threads behind, after a hundred worlds thousands of them, and all gets slow
_PR_SET_PDEATHSIG = 1


class RankError(Exception):
    """A rank raised, died, or did not finish; the message holds its traceback."""


@dataclass(frozen=True)
class Layout:
    """A training grid by its sizes; str() is its name in test ids. virtual: chunks of layers a pipeline stage."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    virtual: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data * self.context

    def __str__(self) -> str:
        sizes = {"TP": self.tensor, "CP": self.context, "PP": self.pipeline, "VP": self.virtual, "DP": self.data}
        return "x".join(f"{name}{n}" for name, n in sizes.items() if n > 1) or "1rank"


@dataclass(frozen=True)
class _Task:
    """store: the file by which the ranks of one world find each other; a new file asks for a new world."""

    function: str
    layout: Layout
    store: Path
    arguments: dict[str, Any]


@dataclass
class _Worker:
    process: BaseProcess
    channel: connection.Connection
    stack_file: Path


def _die_with_parent() -> None:
    """The parent is multiprocessing's fork server, which ends when the process ends that made the pool."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


class _Rank:
    """What a worker process keeps between tasks: its world."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._store: Path | None = None
        self._world: Any = None

    def run(self, task: _Task) -> Any:
        """Joins the task's world where this rank is in another, and calls the function."""
        from rlhf_mc.parallel.world import seed_everything

        module, _, name = task.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        if self._store != task.store:
            self._join(task)
        seed_everything(1)
        try:
            return function(self._world, **task.arguments)
        finally:
            gc.collect()

    def _join(self, task: _Task) -> None:
        import torch
        import torch.distributed as dist

        from rlhf_mc.parallel.grids import TrainingGrid
        from rlhf_mc.parallel.world import build_world, leave_world

        leave_world()
        size = task.layout.size
        dist.init_process_group("gloo", store=dist.FileStore(str(task.store), size), rank=self.rank, world_size=size)
        grid = TrainingGrid(size, self.rank, task.layout.tensor, task.layout.pipeline, task.layout.context, task.layout.virtual)
        self._world = build_world(grid, torch.device("cpu"), seed=1)
        self._store = task.store


def _serve(rank: int, channel: connection.Connection, stack_file: Path) -> None:
    """A worker's life: import, say so, then one task after another until the channel closes."""
    _die_with_parent()
    faulthandler.register(signal.SIGUSR1, file=stack_file.open("w"), all_threads=False)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    importlib.import_module(_IMPORTS)
    importlib.import_module("torch").set_num_threads(1)
    channel.send_bytes(pickle.dumps((True, None)))
    this = _Rank(rank)
    while True:
        try:
            task = pickle.loads(channel.recv_bytes())
        except EOFError:
            return
        try:
            answer = (True, this.run(task))
        except Exception:
            answer = (False, traceback.format_exc())
        channel.send_bytes(pickle.dumps(answer))


class RankPool:
    """Workers 0, 1, ... of this process; a call takes the first `layout.size` of them."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._count = itertools.count()
        self._worlds = 0
        self._layout: Layout | None = None
        self._store = Path()

    def run(self, function: str, layout: Layout = Layout(), timeout_seconds: float = 120.0, **arguments: Any) -> list[Any]:
        """`module:function` on every rank of `layout`, as function(world, **arguments); the results by rank."""
        if layout != self._layout and self._worlds == _WORLDS:
            self.close()
        self._start(layout.size)
        if layout != self._layout:
            self._layout, self._store = layout, self._new_file("store")
            self._worlds += 1
        workers = self._workers[: layout.size]
        message = pickle.dumps(_Task(function, layout, self._store, arguments))
        for worker in workers:
            worker.channel.send_bytes(message)
        return self._collect(workers, f"{function} on {layout}", timeout_seconds)

    def close(self) -> None:
        """Kills the workers; the next `run` starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.channel.close()
        self._workers.clear()
        self._layout, self._worlds = None, 0

    def _new_file(self, name: str) -> Path:
        return Path(self._directory.name) / f"{name}-{next(self._count)}"

    def _start(self, size: int) -> None:
        new = [self._spawn(rank) for rank in range(len(self._workers), size)]
        self._workers += new
        self._collect(new, "start of the ranks", _START_SECONDS)

    def _spawn(self, rank: int) -> _Worker:
        context = get_context("forkserver")
        context.set_forkserver_preload([_IMPORTS])
        ours, theirs = context.Pipe()
        stack_file = self._new_file("stack")
        process = context.Process(target=_serve, args=(rank, theirs, stack_file), name=f"rank {rank}", daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours, stack_file)

    def _collect(self, workers: list[_Worker], what: str, timeout_seconds: float) -> list[Any]:
        """One answer of each worker. RankError for the first that fails; no worker is left where one died or did not answer."""
        deadline = time.monotonic() + timeout_seconds
        answers: dict[int, Any] = {}
        errors: list[str] = []
        while len(answers) < len(workers):
            waiting = {worker.channel: rank for rank, worker in enumerate(workers) if rank not in answers}
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                errors = errors or [f"not done after {timeout_seconds:g} s"]
                errors += [_where(workers[rank], rank) for rank in waiting.values()]
                break
            for rank in (waiting[channel] for channel in ready):
                good, answers[rank] = _answer(workers[rank])
                if not good:
                    errors = errors or [f"rank {rank} failed\n{answers[rank]}"]
                    deadline = min(deadline, time.monotonic() + _AFTER_ERROR_SECONDS)
        if errors:
            self._layout = None
            if len(answers) < len(workers) or not all(worker.process.is_alive() for worker in workers):
                self.close()
            raise RankError("\n".join([f"{what}: {errors[0]}", *errors[1:]]))
        return [answers[rank] for rank in range(len(workers))]


def _answer(worker: _Worker) -> tuple[bool, Any]:
    """(whether it went well, result or traceback)"""
    try:
        return pickle.loads(worker.channel.recv_bytes())
    except (EOFError, ConnectionResetError):
        worker.process.join()
        return False, f"the process ended with exit code {worker.process.exitcode}"


def _where(worker: _Worker, rank: int) -> str:
    """The stack of a worker that is busy."""
    os.kill(worker.process.pid, signal.SIGUSR1)
    time.sleep(0.3)
    return f"rank {rank} was here:\n{worker.stack_file.read_text()}"

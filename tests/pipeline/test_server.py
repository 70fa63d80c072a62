"""Rollouts over the bridge's control group: an engine rank and a trainer rank as two threads, with a scripted engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch.distributed as dist

from rlhf_mc.medusa.draft_length import fixed
from rlhf_mc.parallel.grids import RolloutGrid
from rlhf_mc.parallel.job import Bridge, Job, join_bridge
from rlhf_mc.pipeline.control import BridgeError, Control, Generate, Ready, Stop
from rlhf_mc.pipeline.dispatch import Completion, SampleRequest
from rlhf_mc.pipeline.engine import Step
from rlhf_mc.pipeline.generation import RemoteGeneration
from rlhf_mc.pipeline.server import EngineServer
from rlhf_mc.tracking import StageClock, Trace


@dataclass
class ScriptedEngine:
    """Finishes one request in each step, and makes no step while `free` is not set."""

    free: threading.Event = field(default_factory=threading.Event)
    waiting: list[int] = field(default_factory=list)
    num_heads: int = 0

    def submit(self, requests, *, version: int, greedy: bool) -> None:
        if version == 13:
            raise RuntimeError("no such version")
        self.waiting = list(requests)

    @property
    def num_running(self) -> int:
        return len(self.waiting)

    @property
    def num_in_step(self) -> int:
        return len(self.waiting)

    def step(self, drafted: int) -> Step:
        assert self.free.wait(30) and drafted == 0
        running, sample = len(self.waiting), self.waiting.pop(0)
        return Step({sample: Completion([sample] * 3, [-0.5] * 3, "length", None)}, running, running)


@pytest.fixture
def bridges() -> Iterator[list[Bridge]]:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        jobs = [Job(rank, 2, rank, 2, num_trainers=1) for rank in range(2)]
        yield list(threads.map(lambda job: join_bridge(job, store), jobs))


@pytest.fixture
def alone() -> dist.ProcessGroup:
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1)


def serve(bridge: Bridge, engine: ScriptedEngine) -> threading.Thread:
    server = EngineServer(engine, RolloutGrid.apart(1, 0, 1), reshard=None, control=Control(bridge), clock=StageClock(), trace=Trace(0))
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    return thread


def command(control: Control, num_samples: int) -> None:
    requests = {sample: SampleRequest([1], seed=sample, max_tokens=3) for sample in range(num_samples)}
    control.start({1: Generate(requests, version=0, steps=2, greedy=False, schedule=fixed(0))}).wait()


def test_samples_come_as_they_finish(bridges, alone):
    engine, control = ScriptedEngine(), Control(bridges[0])
    server = serve(bridges[1], engine)
    assert control.receive(1) == Ready()
    for round_number in range(2):  # the second rollout finds the bridge as the first did
        command(control, num_samples=7)
        generation = RemoteGeneration(control, alone, 7, speakers=[1])
        if round_number == 0:
            assert not generation.done
            engine.free.set()
        found: dict[int, Completion] = {}
        while not generation.done:
            some = generation.advance()
            assert not set(some) & set(found)
            found |= some
        assert {sample: completion.token_ids for sample, completion in found.items()} == {s: [s] * 3 for s in range(7)}
        assert generation.advance() == {}
        (load,) = generation.replicas()
        assert (load.tokens, load.longest, load.running) == (21, 3, 4.0) and load.busy >= 0 <= load.idle
    control.start({1: Stop()}).wait()
    server.join(10)
    assert not server.is_alive()


def test_a_lost_engine_rank_is_an_error_where_its_answer_is_awaited(bridges, alone):
    control = Control(bridges[0])
    generation = RemoteGeneration(control, alone, 1, speakers=[1])
    bridges.pop()  # closes its connections
    with pytest.raises(BridgeError, match="look for its own message"):
        generation.advance()

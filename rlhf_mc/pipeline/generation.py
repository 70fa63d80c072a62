"""One rollout while it is being sampled: every rank learns together which samples have finished since it last asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from rlhf_mc.parallel.grids import RolloutGrid
from rlhf_mc.pipeline.dispatch import Completion, SampleRequest, gather_completions
from rlhf_mc.pipeline.engine import Engine

if TYPE_CHECKING:
    from rlhf_mc.tracking import Trace


class Generation(Protocol):
    """A rollout that goes on. What it finishes, and when, is the same on every rank."""

    @property
    def done(self) -> bool:
        """Whether all samples have come back."""

    def advance(self) -> dict[int, Completion]:
        """Collective over all ranks. Works, or waits, for a while; the samples that finished since the last call."""

    def replicas(self) -> list[ReplicaLoad]:
        """Collective over all ranks. What each replica did, once all is done."""


@dataclass(frozen=True)
class ReplicaLoad:
    """What one replica did in one rollout. tokens: sampled.  busy, idle: seconds with something to decode, and without.

    running: mean number of sequences in a step.  longest: tokens of its longest response.
    """

    tokens: int
    busy: float
    idle: float
    running: float
    longest: int


def load_metrics(loads: Sequence[ReplicaLoad]) -> dict[str, float]:
    """rollout/...: what people look at to see whether replicas are balanced, and how long the last one kept the others waiting."""
    rates = [load.tokens / load.busy if load.busy else 0.0 for load in loads]
    busy = [load.busy for load in loads]
    return {
        "rollout/tokens_per_second": sum(load.tokens for load in loads) / max(busy) if max(busy) else 0.0,
        "rollout/tokens_per_second/slowest_replica": min(rates),
        "rollout/sequences_running": sum(load.running for load in loads) / len(loads),
        "rollout/longest_response": float(max(load.longest for load in loads)),
        "rollout/idle_seconds": max(load.idle for load in loads),
        "rollout/slowest_replica_share": max(busy) / (sum(busy) / len(busy)) if sum(busy) else 1.0,
    }


class LocalGeneration:
    """By the engines in the ranks' own processes. Between two exchanges every rank makes the same number of engine steps, or
    fewer where its replica has nothing left; so exchanges come in the same order everywhere, whatever the lengths.
    """

    def __init__(
        self,
        engine: Engine,
        grid: RolloutGrid,
        group: dist.ProcessGroup,
        requests: Sequence[SampleRequest],
        hand: Sequence[int],
        version: int,
        steps: int,
        trace: Trace,
        greedy: bool = False,
    ) -> None:
        """No collective. hand: the samples of this rank's replica.  steps: engine steps between two exchanges.

        group: all ranks (gloo).
        """
        self._engine, self._grid, self._group, self._steps = engine, grid, group, steps
        self._trace = trace
        self._left = len(requests)
        self._tokens = self._engine_steps = self._running = self._longest = 0
        self._start = self._last = time.perf_counter()
        engine.submit({sample: requests[sample] for sample in hand}, version=version, greedy=greedy)

    @property
    def done(self) -> bool:
        """Whether all samples of all replicas have come back."""
        return self._left == 0

    def advance(self) -> dict[int, Completion]:
        """Collective over all ranks: so many engine steps, then one exchange. {} once all is done, without a collective."""
        if self.done:
            return {}
        mine: dict[int, Completion] = {}
        for _ in range(self._steps):
            if not self._engine.num_running:
                break
            self._step(mine)
        self._tokens += sum(len(completion.token_ids) for completion in mine.values())
        self._longest = max([self._longest, *(len(completion.token_ids) for completion in mine.values())])
        found = gather_completions(mine, self._grid, self._group)
        self._left -= len(found)
        return found

    def _step(self, mine: dict[int, Completion]) -> None:
        """One engine step, noted down."""
        running = self._engine.num_running
        self._trace.counter("sequences running", running)
        with self._trace.span("step", track="engine", running=running):
            mine |= self._engine.step()
        self._running += running
        self._engine_steps += 1
        self._last = time.perf_counter()

    def replicas(self) -> list[ReplicaLoad]:
        """Collective over all ranks. What each replica did."""
        mine = ReplicaLoad(
            tokens=self._tokens,
            busy=self._last - self._start,
            idle=time.perf_counter() - self._last,
            running=self._running / max(1, self._engine_steps),
            longest=self._longest,
        )
        loads: list[ReplicaLoad] = [mine] * self._grid.world_size
        if self._grid.world_size > 1:
            dist.all_gather_object(loads, mine, group=self._group)
        return [loads[self._grid.ranks_of(replica)[0]] for replica in range(self._grid.num_replicas)]

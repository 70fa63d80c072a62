"""One rollout while it is being sampled: every rank that trains learns together which samples have finished since it last asked.

`LocalGeneration` steps the engines in the ranks' own processes. `RemoteGeneration` hears from engines that have ranks of
their own, and decode meanwhile.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch.distributed as dist

from rlhf_mc.medusa.draft_length import DraftSchedule, DraftStatistics, StepMeasure
from rlhf_mc.parallel.grids import RolloutGrid
from rlhf_mc.pipeline.control import Control, ReplicaLoad
from rlhf_mc.pipeline.dispatch import Completion, SampleRequest, gather_completions
from rlhf_mc.pipeline.engine import Engine, Step

if TYPE_CHECKING:
    from rlhf_mc.tracking import Trace

T = TypeVar("T")
_REPLICAS_SHOWN = 8
_LONGEST_WAIT_SECONDS = 60.0  # well within the time-out of the collective in which the other ranks wait


class Generation(Protocol):
    """A rollout that goes on. What it finishes, and when, is the same on every rank."""

    @property
    def done(self) -> bool:
        """Whether all samples have come back."""

    def advance(self) -> dict[int, Completion]:
        """Collective over all ranks that train. The samples that finished since the last call.

        An engine in the ranks' own processes works for a while. Another works by itself: where nothing has finished,
        the call waits, a minute at most.
        """

    def replicas(self) -> list[ReplicaLoad]:
        """Collective over all ranks that train. What each replica did, once all is done."""


class Decoding:
    """One replica's share of a rollout, in the engine of this process."""

    def __init__(
        self, engine: Engine, requests: Mapping[int, SampleRequest], version: int, greedy: bool, schedule: DraftSchedule, trace: Trace
    ) -> None:
        """No collective, but all ranks of a replica must be given the same. Raises EngineError as `Engine.submit` does.

        schedule: how many tokens each step drafts.  trace: gets the engine's steps.
        """
        self._engine, self._schedule, self._trace = engine, schedule, trace
        self._drafts = DraftStatistics(engine.num_heads)
        self._tokens = self._steps = self._running = self._longest = 0
        self._start = self._last = time.perf_counter()
        engine.submit(requests, version=version, greedy=greedy)

    @property
    def done(self) -> bool:
        """Whether this replica has finished its samples."""
        return self._engine.num_running == 0

    def advance(self, steps: int) -> dict[int, Completion]:
        """Collective over the replica's ranks. So many engine steps, or fewer where nothing is left; what finished in them."""
        finished: dict[int, Completion] = {}
        for _ in range(steps):
            if self.done:
                break
            finished |= self._step()
        lengths = [len(completion.token_ids) for completion in finished.values()]
        self._tokens += sum(lengths)
        self._longest = max([self._longest, *lengths])
        return finished

    def _step(self) -> dict[int, Completion]:
        """One engine step, noted down."""
        running, engine = self._engine.num_running, self._engine
        proposed = self._schedule.drafted(engine.num_in_step, self._drafts.steps_at(engine.num_in_step))
        self._trace.counter("sequences running", running)
        start = time.perf_counter()
        with self._trace.span("step", track="engine", running=running, drafted=proposed):
            step = engine.step(proposed)
        self._last = time.perf_counter()
        self._drafts.add(_measure(step, proposed, self._last - start))
        self._running += running
        self._steps += 1
        return step.finished

    def load(self) -> ReplicaLoad:
        """What the replica did up to now."""
        return ReplicaLoad(
            tokens=self._tokens,
            busy=self._last - self._start,
            idle=time.perf_counter() - self._last,
            running=self._running / max(1, self._steps),
            longest=self._longest,
            drafts=self._drafts.numbers(),
        )


def _measure(step: Step, proposed: int, seconds: float) -> StepMeasure:
    accepted = tuple(sum(count > position for count in step.accepted) for position in range(step.checked))
    return StepMeasure(step.running, step.tokens, seconds, step.checked, proposed, len(step.accepted), accepted)


def load_metrics(loads: Sequence[ReplicaLoad]) -> dict[str, float]:
    """rollout/...: whether replicas are balanced, and how long the last one kept the others waiting.

    A replica that got no sample counts nowhere. With few replicas, each has its own numbers too.
    """
    worked = [load for load in loads if load.busy > 0]
    if not worked:
        return {}
    busy = [load.busy for load in worked]
    metrics = {
        "rollout/tokens_per_second": sum(load.tokens for load in worked) / max(busy),
        "rollout/tokens_per_second/slowest_replica": min(load.tokens / load.busy for load in worked),
        "rollout/sequences_running": sum(load.running for load in worked) / len(worked),
        "rollout/longest_response": float(max(load.longest for load in worked)),
        "rollout/idle_seconds": max(load.idle for load in worked),
        "rollout/slowest_replica_share": max(busy) / (sum(busy) / len(busy)),
    }
    if 1 < len(loads) <= _REPLICAS_SHOWN:
        for replica, load in enumerate(loads):
            rate = load.tokens / load.busy if load.busy > 0 else 0.0
            numbers = {"tokens_per_second": rate, "running": load.running, "longest": float(load.longest), "idle_seconds": load.idle}
            metrics |= {f"rollout/replica_{replica}/{name}": number for name, number in numbers.items()}
    return metrics


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
        schedule: DraftSchedule,
        trace: Trace,
        greedy: bool = False,
    ) -> None:
        """No collective. hand: the samples of this rank's replica.  steps: engine steps between two exchanges.

        group: all ranks (gloo).  schedule: how many tokens to draft.
        """
        self._grid, self._group, self._steps = grid, group, steps
        self._left = len(requests)
        self._decoding = Decoding(engine, {sample: requests[sample] for sample in hand}, version, greedy, schedule, trace)

    @property
    def done(self) -> bool:
        """Whether all samples of all replicas have come back."""
        return self._left == 0

    def advance(self) -> dict[int, Completion]:
        """Collective over all ranks: so many engine steps, then one exchange. {} once all is done, without a collective."""
        if self.done:
            return {}
        found = gather_completions(self._decoding.advance(self._steps), self._grid, self._group)
        self._left -= len(found)
        return found

    def replicas(self) -> list[ReplicaLoad]:
        """Collective over all ranks. What each replica did."""
        mine = self._decoding.load()
        loads: list[ReplicaLoad] = [mine] * self._grid.world_size
        if self._grid.world_size > 1:
            dist.all_gather_object(loads, mine, group=self._group)
        return [loads[self._grid.ranks_of(replica)[0]] for replica in range(self._grid.num_replicas)]


class RemoteGeneration:
    """By engines on ranks of their own. Threads of rank 0, one a replica, take their answers as they come; rank 0 then tells the
    other ranks.
    """

    def __init__(self, control: Control, group: dist.ProcessGroup, num_samples: int, speakers: Sequence[int]) -> None:
        """No collective. The engines have their commands already.

        group: all ranks that train (gloo).  speakers: of each replica, the rank of the job that answers for it.
        """
        self._control, self._group, self._left, self._speakers = control, group, num_samples, speakers
        self._loads: dict[int, ReplicaLoad] = {}
        self._ends: dict[int, float] = {}
        self._answers: queue.SimpleQueue[Mapping[int, Completion] | Exception] = queue.SimpleQueue()
        self._listeners = [
            threading.Thread(target=self._listen, args=[rank], name=f"answers of rank {rank}", daemon=True)
            for rank in (speakers if self._hears else [])
        ]
        for listener in self._listeners:
            listener.start()

    @property
    def done(self) -> bool:
        """Whether all samples of all replicas have come back."""
        return self._left == 0

    def advance(self) -> dict[int, Completion]:
        """Collective over all ranks that train. What has arrived since, waited for if nothing has; {} once all is done, without a collective.

        Raises BridgeError on rank 0 where an engine's rank is gone.
        """
        if self.done:
            return {}
        found = self._told(self._arrived(_LONGEST_WAIT_SECONDS) if self._hears else {})
        self._left -= len(found)
        if self.done and self._hears:
            self._finish()
        return found

    def replicas(self) -> list[ReplicaLoad]:
        """Collective over all ranks that train. What each replica did."""
        now = time.perf_counter()
        return self._told([replace(self._loads[r], idle=now - self._ends[r]) for r in self._speakers] if self._hears else [])

    @property
    def _hears(self) -> bool:
        """Whether this is the rank that the engines answer."""
        return self._group.rank() == 0

    def _listen(self, rank: int) -> None:
        """Until the last answer of the replica, or an error, which is raised where the answers are taken."""
        try:
            while rank not in self._loads:
                progress = self._control.receive(rank)
                if progress.load is not None:
                    self._loads[rank], self._ends[rank] = progress.load, time.perf_counter()
                self._answers.put(progress.finished)
        except Exception as error:
            self._answers.put(error)

    def _finish(self) -> None:
        """Takes the last answers too: those that come after are for another command."""
        for listener in self._listeners:
            listener.join()
        self._arrived(0.0)

    def _arrived(self, seconds: float) -> dict[int, Completion]:
        """What has arrived; waits so long for the first of it."""
        found: dict[int, Completion] = {}
        while True:
            try:
                answer = self._answers.get(timeout=seconds)
            except queue.Empty:
                return found
            if isinstance(answer, Exception):
                raise answer
            found |= answer
            seconds = 0.0

    def _told(self, value: T) -> T:
        """Collective over all ranks that train: rank 0's value."""
        values = [value]
        if self._group.size() > 1:
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

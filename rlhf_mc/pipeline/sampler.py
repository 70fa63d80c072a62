"""Where responses come from, as the stages see it: engines in the trainer's own processes, or on ranks of their own.

Both are asked in the same words. What one placement need not do, it does in no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mc.batch import SequenceBatch
from rlhf_mc.medusa.draft_length import DraftSchedule
from rlhf_mc.parallel.exchange import NoPlaces, Reshard
from rlhf_mc.parallel.grids import RolloutGrid
from rlhf_mc.parallel.reshard import ReshardPlan
from rlhf_mc.parallel.world import World
from rlhf_mc.pipeline.control import Command, ComputeLogprobs, Control, Generate, Stop, TakeWeights
from rlhf_mc.pipeline.dispatch import SampleRequest
from rlhf_mc.pipeline.engine import Engine
from rlhf_mc.pipeline.generation import Generation, LocalGeneration, RemoteGeneration

if TYPE_CHECKING:
    from rlhf_mc.tracking import Trace


class Sampler(Protocol):
    """The engines, from their start to the end of a `with` block. All methods but `sleep` and the two of waking are collective over all ranks
    that train.

    probe: the sequence that proves a weight sync.  shares_devices: whether the trainer must leave the device for the engine.
    """

    probe: SequenceBatch
    shares_devices: bool

    @property
    def num_replicas(self) -> int:
        """Engines that generate side by side."""

    @property
    def plan(self) -> ReshardPlan:
        """How the actor's shards become the engines'."""

    def wake_weights(self) -> None:
        """Before a sync: the engine drops what it holds, and takes memory for new weights."""

    def sync(self, params: Mapping[str, Tensor], version: int) -> None:
        """The engines hold these weights (this rank's shard, by megatron's names) as `version` afterwards, proven by checksums.

        Raises ReshardError on every rank where they arrived damaged.
        """

    def wake_kv_cache(self) -> None:
        """After a sync, when the trainer has left: the engine takes the rest of its memory."""

    def logprobs(self, token_ids: list[int], version: int) -> Tensor:
        """float32[engine ranks, len - 1], on every rank: each engine rank's log-probs of the tokens after the first."""

    def start(
        self,
        requests: Sequence[SampleRequest],
        hands: Sequence[Sequence[int]],
        version: int,
        schedule: DraftSchedule,
        greedy: bool = False,
    ) -> Generation:
        """Begins a rollout. requests: all samples.  hands: of each replica, the numbers of its samples.  schedule: of the drafts.

        Raises EngineError where an engine holds other weights than `version`.
        """

    def sleep(self) -> None:
        """After a rollout: the engine's memory is the trainer's, where they share a device. A sync must follow."""

    def __enter__(self) -> Sampler:
        """Itself."""

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """The end of the engines, when the run is done."""


@dataclass(frozen=True)
class _Engines:
    """What both placements have. grid: the engines' ranks.  steps: of an engine between two exchanges."""

    grid: RolloutGrid
    reshard: Reshard
    world: World
    probe: SequenceBatch
    steps: int

    @property
    def num_replicas(self) -> int:
        return self.grid.num_replicas

    @property
    def plan(self) -> ReshardPlan:
        return self.reshard.plan


@dataclass(frozen=True)
class ColocatedSampler(_Engines):
    """The engine in this rank's process, with its place in the rollout grid."""

    engine: Engine
    trace: Trace
    shares_devices: bool = True

    def wake_weights(self) -> None:
        self.sleep()
        with self._span("wake weights"):
            self.engine.wake_weights()

    def sync(self, params: Mapping[str, Tensor], version: int) -> None:
        with self._span("new weights"), self.engine.weight_update(version) as update:
            self.reshard.run(params, update)

    def wake_kv_cache(self) -> None:
        with self._span("wake KV cache"):
            self.engine.wake_kv_cache()

    def logprobs(self, token_ids: list[int], version: int) -> Tensor:
        mine = self.engine.logprobs(token_ids, version=version)
        found = [torch.empty_like(mine) for _ in range(self.world.size)]
        dist.all_gather(found, mine, group=self.world.everyone)
        return torch.stack(found)

    def start(
        self,
        requests: Sequence[SampleRequest],
        hands: Sequence[Sequence[int]],
        version: int,
        schedule: DraftSchedule,
        greedy: bool = False,
    ) -> Generation:
        hand = hands[self.grid.replica]
        return LocalGeneration(self.engine, self.grid, self.world.everyone, requests, hand, version, self.steps, schedule, self.trace, greedy)

    def sleep(self) -> None:
        with self._span("sleep"):
            self.engine.sleep()

    def _span(self, name: str) -> AbstractContextManager[None]:
        return self.trace.span(name, track="engine")

    def __enter__(self) -> ColocatedSampler:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.engine.close()


@dataclass(frozen=True)
class SeparateSampler(_Engines):
    """Engines on the last ranks of the job, commanded by rank 0. The grid numbers them from 0."""

    control: Control
    shares_devices: bool = False

    def wake_weights(self) -> None:
        """Nothing: new weights are written over the old ones."""

    def sync(self, params: Mapping[str, Tensor], version: int) -> None:
        self._command([TakeWeights(version)] * self.grid.world_size)
        self.reshard.run(params, NoPlaces())

    def wake_kv_cache(self) -> None:
        """Nothing: it is awake."""

    def logprobs(self, token_ids: list[int], version: int) -> Tensor:
        self._command([ComputeLogprobs(token_ids, version)] * self.grid.world_size)
        found = torch.empty(self.grid.world_size, len(token_ids) - 1)
        if self.world.rank == 0:
            found = torch.stack(self._answers())
        dist.broadcast(found, src=0, group=self.world.everyone)
        return found

    def start(
        self,
        requests: Sequence[SampleRequest],
        hands: Sequence[Sequence[int]],
        version: int,
        schedule: DraftSchedule,
        greedy: bool = False,
    ) -> Generation:
        commands = [Generate({sample: requests[sample] for sample in hand}, version, self.steps, greedy, schedule) for hand in hands]
        replicas = [self.grid.ranks_of(replica) for replica in range(self.num_replicas)]
        by_rank = {rank: command for ranks, command in zip(replicas, commands, strict=True) for rank in ranks}
        self._command([by_rank[rank] for rank in range(self.grid.world_size)])
        return RemoteGeneration(self.control, self.world.everyone, len(requests), [self._ranks[ranks[0]] for ranks in replicas])

    def sleep(self) -> None:
        """Nothing: the engines have their devices to themselves."""

    def __enter__(self) -> SeparateSampler:
        """Rank 0 waits until the engines have started."""
        self._answers()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """After an error the engines are not told: one that decodes would not listen. They end when this process does."""
        if kind is None:
            self._command([Stop()] * self.grid.world_size)

    @property
    def _ranks(self) -> range:
        """The engines' ranks in the job."""
        return range(self.world.size, self.world.size + self.grid.world_size)

    def _answers(self) -> list[Any]:
        """On rank 0, one answer of each engine rank, in their order; nothing elsewhere. No collective."""
        return [self.control.receive(rank) for rank in self._ranks] if self.world.rank == 0 else []

    def _command(self, commands: Sequence[Command]) -> None:
        """Rank 0 tells each engine rank its command, which it takes when it has obeyed those before. No collective."""
        if self.world.rank == 0:
            self.control.start(dict(zip(self._ranks, commands, strict=True))).wait()

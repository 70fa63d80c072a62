"""Who does what on which rank: the rollout grid (vLLM's) and the training grid (megatron-core's), two separate objects.

Pure arithmetic on ranks. Process groups are not here; they are made from these lists of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf_mc.config import ConfigError, Parallel


@dataclass(frozen=True)
class TrainingGrid:
    """The trainer's view of the ranks: megatron-core's order, tensor fastest, then context, then data, then pipeline.

    Ranks that differ in their context or data rank only hold the same shard: they are copies of each other. Each rank holds
    `virtual` chunks of layers: the stack goes through all pipeline stages so many times (arXiv:2104.04473, section 2.2).
    Raises ConfigError where the ranks cannot be divided.
    """

    world_size: int
    rank: int
    tensor: int
    pipeline: int
    context: int = 1
    virtual: int = 1

    @staticmethod
    def of(parallel: Parallel, world_size: int, rank: int) -> TrainingGrid:
        """The grid that the settings ask for."""
        return TrainingGrid(world_size, rank, parallel.tensor, parallel.pipeline, parallel.context, parallel.virtual_pipeline)

    def __post_init__(self) -> None:
        sizes = self.tensor, self.context, self.pipeline
        if min(sizes) < 1 or self.world_size % math.prod(sizes):
            raise ConfigError(
                f"parallel: {self.world_size} ranks cannot be divided into tensor {self.tensor} x context {self.context} x pipeline "
                f"{self.pipeline}; start a multiple of their product, or lower parallel.tensor, parallel.context or parallel.pipeline"
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not one of {self.world_size} ranks")

    @property
    def data(self) -> int:
        """Number of ranks, or groups of ranks that share sequences, that train on different sequences."""
        return self.copies // self.context

    @property
    def copies(self) -> int:
        """Number of copies of the model: gradients are summed, and the optimizer is sharded, over so many ranks."""
        return self.world_size // (self.tensor * self.pipeline)

    @property
    def tensor_rank(self) -> int:
        """Index of this rank's shard of each split weight."""
        return self.rank % self.tensor

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of the sequences."""
        return self.copy_rank // self.context

    @property
    def context_rank(self) -> int:
        """Index of this rank's part of each sequence."""
        return self.copy_rank % self.context

    @property
    def copy_rank(self) -> int:
        """Index of this rank's copy of the model."""
        return self.rank // self.tensor % self.copies

    @property
    def stage(self) -> int:
        """Pipeline stage of this rank."""
        return self.rank // (self.tensor * self.copies)

    @property
    def chunks(self) -> list[int]:
        """Which of the model's `pipeline` x `virtual` chunks of layers this rank holds, in the model's order."""
        return [turn * self.pipeline + self.stage for turn in range(self.virtual)]

    @property
    def microbatch_multiple(self) -> int:
        """What the number of micro-batches must be a multiple of: where chunks take turns, each turn is `pipeline` micro-batches long."""
        return self.pipeline if self.virtual > 1 else 1

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the head."""
        return self.stage == self.pipeline - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank's numbers count when those of all ranks are added: one rank for each copy of the model."""
        return self.is_last_stage and self.tensor_rank == 0

    def rank_at(self, tensor_rank: int, copy_rank: int, stage: int) -> int:
        """The rank in that place of the grid."""
        return (stage * self.copies + copy_rank) * self.tensor + tensor_rank

    def model_ranks(self) -> list[int]:
        """The ranks that together hold this rank's copy of the model, by stage, then tensor rank."""
        return [self.rank_at(t, self.copy_rank, stage) for stage in range(self.pipeline) for t in range(self.tensor)]


@dataclass(frozen=True)
class RolloutGrid:
    """The engine's view of the ranks: replicas of the policy, each split over `tensor` ranks of one copy of the trained model.

    Ranks of a copy are taken tensor-major, all pipeline stages of tensor rank 0 first, and neighbours in that order hold the
    same shard of the engine, each for another replica. So a rank's rollout shard contains its training shard wherever
    rollout TP divides training TP: HybridFlow's grouping (arXiv:2409.19256, section 5.3), with pipeline stages folded in. A
    replica's ranks lie at intervals then, not side by side.
    Raises ConfigError where a copy of the model cannot be divided into whole replicas.
    """

    training: TrainingGrid
    tensor: int

    def __post_init__(self) -> None:
        model = self.training.tensor * self.training.pipeline
        if self.tensor < 1 or model % self.tensor:
            raise ConfigError(
                f"rollout.tensor_parallel: the {model} ranks of one copy of the model (parallel.tensor {self.training.tensor} x "
                f"parallel.pipeline {self.training.pipeline}) cannot be divided into replicas of {self.tensor} ranks; "
                "choose a rollout.tensor_parallel that divides their number"
            )

    @staticmethod
    def apart(world_size: int, rank: int, tensor: int) -> RolloutGrid:
        """The grid of engines that have `world_size` ranks to themselves: a replica's ranks lie side by side."""
        return RolloutGrid(TrainingGrid(world_size, rank, tensor, pipeline=1), tensor)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.training.world_size

    @property
    def rank(self) -> int:
        """This rank."""
        return self.training.rank

    @property
    def replicas_per_model(self) -> int:
        """Replicas on the ranks of one copy of the trained model."""
        return self.training.tensor * self.training.pipeline // self.tensor

    @property
    def num_replicas(self) -> int:
        """Engines that generate side by side, each holding the whole policy."""
        return self.training.copies * self.replicas_per_model

    @property
    def replica(self) -> int:
        """Index of the replica that this rank belongs to."""
        return self.training.copy_rank * self.replicas_per_model + self._order % self.replicas_per_model

    @property
    def tensor_rank(self) -> int:
        """Index of this rank's shard in its replica; 0 speaks for the replica."""
        return self._order // self.replicas_per_model

    @property
    def _order(self) -> int:
        return self.training.tensor_rank * self.training.pipeline + self.training.stage

    def ranks_of(self, replica: int) -> list[int]:
        """The ranks of one replica, in the order of their shards."""
        if not 0 <= replica < self.num_replicas:
            raise ValueError(f"replica {replica} is not one of {self.num_replicas} replicas")
        copy_rank, seat = divmod(replica, self.replicas_per_model)
        places = (divmod(shard * self.replicas_per_model + seat, self.training.pipeline) for shard in range(self.tensor))
        return [self.training.rank_at(tensor_rank, copy_rank, stage) for tensor_rank, stage in places]

    def shards_of_model(self) -> list[int]:
        """For each rank of a copy of the trained model, in the order of `TrainingGrid.model_ranks`, its shard in its replica."""
        training = self.training
        return [
            (tensor_rank * training.pipeline + stage) // self.replicas_per_model
            for stage in range(training.pipeline)
            for tensor_rank in range(training.tensor)
        ]

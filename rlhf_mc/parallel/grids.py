"""Who does what on which rank: the rollout grid (vLLM's) and the training grid (megatron-core's), two separate objects.

Pure arithmetic on ranks. Process groups are not here; they are made from these lists of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_mc.config import ConfigError


@dataclass(frozen=True)
class RolloutGrid:
    """The engine's view of the ranks: replicas of the policy, each split over `tensor` neighbouring ranks.

    Raises ConfigError where the ranks cannot be divided into whole replicas.
    """

    world_size: int
    rank: int
    tensor: int

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.world_size % self.tensor:
            raise ConfigError(
                f"rollout.tensor_parallel: {self.world_size} ranks cannot be divided into replicas of {self.tensor} ranks; "
                "start a multiple of it, or choose a rollout.tensor_parallel that divides the number of ranks"
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not one of {self.world_size} ranks")

    @property
    def num_replicas(self) -> int:
        """Engines that generate side by side, each holding the whole policy."""
        return self.world_size // self.tensor

    @property
    def replica(self) -> int:
        """Index of the replica that this rank belongs to."""
        return self.rank // self.tensor

    @property
    def tensor_rank(self) -> int:
        """Index of this rank's shard in its replica; 0 speaks for the replica."""
        return self.rank % self.tensor

    def ranks_of(self, replica: int) -> range:
        """The ranks of one replica, in the order of their shards."""
        if not 0 <= replica < self.num_replicas:
            raise ValueError(f"replica {replica} is not one of {self.num_replicas} replicas")
        return range(replica * self.tensor, (replica + 1) * self.tensor)


@dataclass(frozen=True)
class TrainingGrid:
    """The trainer's view of the ranks: megatron-core's order, tensor fastest, then data, then pipeline.

    Raises ConfigError where the ranks cannot be divided.
    """

    world_size: int
    rank: int
    tensor: int
    pipeline: int

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.pipeline < 1 or self.world_size % (self.tensor * self.pipeline):
            raise ConfigError(
                f"parallel: {self.world_size} ranks cannot be divided into tensor {self.tensor} x pipeline {self.pipeline}; "
                "start a multiple of their product, or lower parallel.tensor or parallel.pipeline"
            )

    @property
    def data(self) -> int:
        """Number of data-parallel copies of the model."""
        return self.world_size // (self.tensor * self.pipeline)

    @property
    def tensor_rank(self) -> int:
        """Index of this rank's shard of each split weight."""
        return self.rank % self.tensor

    @property
    def data_rank(self) -> int:
        """Index of this rank's copy of the model."""
        return self.rank // self.tensor % self.data

    @property
    def stage(self) -> int:
        """Pipeline stage of this rank."""
        return self.rank // (self.tensor * self.data)

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
        """Whether this rank's numbers count when those of all ranks are added: one rank for each data-parallel copy."""
        return self.is_last_stage and self.tensor_rank == 0

    def model_ranks(self) -> list[int]:
        """The ranks that together hold this rank's copy of the model, by stage, then tensor rank."""
        return [
            stage * self.tensor * self.data + self.data_rank * self.tensor + t
            for stage in range(self.pipeline)
            for t in range(self.tensor)
        ]

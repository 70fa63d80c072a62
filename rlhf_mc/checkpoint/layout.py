"""On which layout a checkpoint was saved, and which pieces of the whole tensors each of its ranks holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rlhf_mc.config import Settings
from rlhf_mc.medusa.drafter import DraftModel
from rlhf_mc.medusa.shape import HeadsShape, trainer_pieces
from rlhf_mc.models.hf_config import ModelShape, padded_rows
from rlhf_mc.models.role import Resident, RoleModel
from rlhf_mc.models.weight_layout import Shard, pieces_of
from rlhf_mc.parallel.grids import TrainingGrid
from rlhf_mc.parallel.reshard import Piece


@dataclass(frozen=True)
class Layout:
    """Ranks that train, and how they share the models and the optimizers' states. virtual: chunks of layers on each."""

    ranks: int
    tensor: int
    pipeline: int
    distributed_optimizer: bool
    virtual: int

    @staticmethod
    def of(settings: Settings, ranks: int) -> Layout:
        """The layout of a run on so many training ranks."""
        parallel = settings.parallel
        return Layout(ranks, parallel.tensor, parallel.pipeline, parallel.distributed_optimizer, parallel.virtual_pipeline)

    def record(self) -> dict[str, int | bool]:
        """As JSON has it: Layout(**record) is the layout."""
        return asdict(self)

    def __str__(self) -> str:
        optimizer = "distributed" if self.distributed_optimizer else "plain"
        return f"{self.ranks} ranks, tensor {self.tensor}, pipeline {self.pipeline} x {self.virtual}, {optimizer} optimizer"

    def grid(self, rank: int) -> TrainingGrid:
        """The place of a rank."""
        return TrainingGrid(self.ranks, rank, self.tensor, self.pipeline, virtual=self.virtual)

    def copies(self) -> Iterator[list[int]]:
        """For each tensor rank of each pipeline stage, the ranks that together wrote the states of one shard."""
        first = self.grid(0)
        writers = first.data if self.distributed_optimizer else 1
        for stage in range(self.pipeline):
            for tensor_rank in range(self.tensor):
                yield [first.rank_at(tensor_rank, data_rank, stage) for data_rank in range(writers)]


def heads_pieces(shape: HeadsShape, grid: TrainingGrid) -> list[Piece]:
    """Of draft heads."""
    rows = padded_rows(shape.vocab, grid.tensor)
    return trainer_pieces(shape, rows, grid.tensor, grid.tensor_rank) if grid.is_last_stage else []


def model_pieces(shape: ModelShape, value_head: bool, grid: TrainingGrid) -> list[Piece]:
    """Of one of the four models."""
    return pieces_of(shape, Shard.of(shape, grid, value_head))


def shard_pieces(model: Resident, grid: TrainingGrid) -> list[Piece]:
    """What a rank in the place of `grid` holds of a role, by the names of whole tensors."""
    if isinstance(model, DraftModel):
        return heads_pieces(model.shape, grid)
    if isinstance(model, RoleModel):
        return model_pieces(model.shape, model.head == "value", grid)
    raise TypeError(f"{model.role.value}: nothing is known of how a {type(model).__name__} is split over ranks")

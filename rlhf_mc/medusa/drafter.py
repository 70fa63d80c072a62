"""The heads as a role: their weights, optimizer and updates beside the actor's, and the whole tensors in and out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rlhf_mc.config import ConfigError, Settings
from rlhf_mc.medusa.files import save_heads
from rlhf_mc.medusa.heads import MedusaHeads
from rlhf_mc.medusa.shape import HeadsShape, trainer_pieces
from rlhf_mc.models.heads import padded_output_weight
from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.models.hf_weights import Owned, gather_tensors, read_output_layer
from rlhf_mc.models.optimizer import build_optimizer, step_optimizer, wrap_for_training
from rlhf_mc.models.role import Resident, Role, RoleModel
from rlhf_mc.models.whole_directory import SaveError


@dataclass(kw_only=True)
class DraftModel(Resident):
    """The draft heads on this rank; without a parameter on a pipeline stage before the last, but called there all the same.

    padded_vocab: rows of an output layer over all tensor ranks.
    """

    role: Role = Role.MEDUSA
    shape: HeadsShape
    heads: MedusaHeads
    padded_vocab: int

    def weights(self) -> Iterator[Tensor]:
        """The parameters; a shared output layer is the actor's."""
        yield from self.heads.parameters()

    def params(self) -> dict[str, nn.Parameter]:
        """By the names of medusa/shape.py."""
        return dict(self.heads.named_parameters())

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Collective over the model group: every rank must take every item. (name, whole tensor on the device), as in the files.

        The tensors are good until the next item is taken.
        """
        self.check_present("params")
        grid = self.world.grid
        owned: Owned = [{} for _ in range(grid.tensor * grid.pipeline)]
        for tensor_rank in range(grid.tensor):
            position = (grid.pipeline - 1) * grid.tensor + tensor_rank
            for piece in trainer_pieces(self.shape, self.padded_vocab, grid.tensor, tensor_rank):
                owned[position][piece.name] = [piece]
        yield from gather_tensors(self.shape.tensors(), self.params(), owned, self.heads.config.params_dtype, self.world)

    def save(self, target: str | Path, model: ModelShape, model_directory: str | Path) -> None:
        """Collective over all ranks. Rank 0 writes a directory of heads; SaveError on every rank where it cannot. The model is saved in
        `model_directory`, which rank 0 reads.
        """
        writes = self.world.rank == 0
        output_layer = read_output_layer(model_directory, model) if writes and self.shape.shared_output else None
        self.world.together(lambda: save_heads(target, self.shape, model, self.export(), output_layer, writes), SaveError)


def build_drafter(settings: Settings, actor: RoleModel, trained: bool, tensors: Mapping[str, Tensor] | None = None) -> DraftModel:
    """Collective over all ranks. The heads of `settings.medusa` on `actor`, whose params must be there; trained, or frozen.

    tensors: whole tensors by name to start from. None: blocks of zeros, and own output layers that copy the actor's.
    Raises ConfigError where the tensor-parallel size does not divide the hidden size, or `tensors` are of other heads.
    """
    actor.check_present("params")
    world, shape = actor.world, HeadsShape.of(settings.medusa, actor.shape)
    if shape.hidden % world.grid.tensor:
        raise ConfigError(
            f"parallel.tensor={world.grid.tensor} does not divide the hidden size {shape.hidden} of actor.path, by which draft heads "
            "are split; use a tensor-parallel size that does, or medusa.enabled=false"
        )
    padded_vocab = actor.shape.padded_vocab(world.grid.tensor)
    with world.device:
        heads = MedusaHeads(actor.config, shape, padded_vocab, world.tensor_group, present=world.grid.is_last_stage)
    drafter = DraftModel(world=world, shape=shape, heads=heads, padded_vocab=padded_vocab)
    if tensors is None:
        _copy_output_of(actor, heads)
    else:
        _fill(drafter, tensors)
    if trained:
        drafter.ddp = (wrap_for_training(heads, settings.parallel.distributed_optimizer),)
        drafter.optimizer = build_optimizer(drafter.ddp, settings.medusa.optim, actor.dtype, world.device)
    else:
        heads.requires_grad_(False)
    return drafter


@torch.no_grad()
def _copy_output_of(actor: RoleModel, heads: MedusaHeads) -> None:
    for output in heads.lm_heads:
        output.weight.copy_(padded_output_weight(actor.last_chunk))


@torch.no_grad()
def _fill(drafter: DraftModel, tensors: Mapping[str, Tensor]) -> None:
    """This rank's rows of the whole `tensors`; padded rows stay zero."""
    shapes, found = drafter.shape.tensors(), {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != shapes:
        wrong = next(name for name in [*shapes, *found] if found.get(name) != shapes.get(name))
        raise ConfigError(
            f"medusa.path: {wrong} has shape {found.get(wrong, 'none')} there, and {shapes.get(wrong, 'none')} by the settings "
            "and the actor; these are other heads, or another model's"
        )
    params, grid = drafter.params(), drafter.world.grid
    pieces = trainer_pieces(drafter.shape, drafter.padded_vocab, grid.tensor, grid.tensor_rank) if grid.is_last_stage else []
    for piece in pieces:
        rows = tensors[piece.name].narrow(piece.dim, piece.whole_start, piece.length)
        params[piece.param].narrow(piece.dim, piece.start, piece.length).copy_(rows)


def update_heads(drafter: DraftModel, lr: float) -> float:
    """Collective over all ranks. Sums the gradients over ranks, clips, steps at `lr`; the gradient norm before clipping.

    Where it is not finite, no rank steps.
    """
    drafter.check_present("params", "gradients", "optimizer")
    # All that megatron's finalize_model_grads does for parameters which are neither tied nor whole on each tensor rank.
    for ddp in drafter.ddp:
        ddp.finish_grad_sync()
    grad_norm = step_optimizer(drafter.optimizer, lr, drafter.world.on_cpu)
    drafter.version += math.isfinite(grad_norm)
    drafter.accumulating = False
    return grad_norm

"""A role that is on the device beside the actor: tensors of the draft heads' shapes, trained on gradients that are made up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlhf_mc.config import Medusa, Optim
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.optimizer import build_optimizer, step_optimizer, wrap_for_training
from rlhf_mc.models.role import Resident, Role, RoleModel


class ShardOfHeads(nn.Module):
    """One rank's rows of every weight, in the order of HeadsShape; none before the last pipeline stage."""

    def __init__(self, shape: HeadsShape, actor: RoleModel) -> None:
        super().__init__()
        self.config = actor.config  # megatron's wrapper asks for it
        grid = actor.world.grid
        blocks = [shape.hidden] * len(shape.block_names)
        outputs = [actor.shape.padded_vocab(grid.tensor)] * len(shape.output_names)
        rows = [n // grid.tensor for n in blocks + outputs] if grid.is_last_stage else []
        weights = [0.1 * torch.randn(n, shape.hidden).to(actor.dtype) for n in rows]
        self.weights = nn.ParameterList(nn.Parameter(weight) for weight in weights)


@dataclass(kw_only=True)
class DraftHeads(Resident):
    """Draft heads as far as offload sees them."""

    module: ShardOfHeads

    def weights(self) -> Iterator[Tensor]:
        """Their parameters."""
        yield from self.module.parameters()

    def params(self) -> dict[str, nn.Parameter]:
        """By their names in the module."""
        return dict(self.module.named_parameters())

    def step(self) -> float:
        """Collective over all ranks. One optimizer step; the gradient norm."""
        self.check_present("params", "gradients", "optimizer")
        [ddp] = self.ddp
        ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        for weight in self.weights():
            weight.main_grad.copy_(weight.detach().float().cos())
        ddp.finish_grad_sync()
        norm = step_optimizer(self.optimizer, 1e-3, self.world.on_cpu)
        self.version += 1
        return norm


def draft_heads(actor: RoleModel, settings: Medusa, optim: Optim | None = None, distributed: bool = True) -> DraftHeads:
    """Collective over all ranks. Heads on `actor`, in its precision; trained where `optim` is given."""
    module = ShardOfHeads(HeadsShape.of(settings, actor.shape), actor)
    heads = DraftHeads(role=Role.MEDUSA, world=actor.world, module=module)
    if optim is None:
        module.requires_grad_(False)
    else:
        heads.ddp = (wrap_for_training(module, distributed),)
        heads.optimizer = build_optimizer(heads.ddp, optim, actor.dtype, actor.world.device)
    return heads

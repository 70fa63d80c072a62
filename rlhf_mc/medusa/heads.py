"""The draft heads of one rank (arXiv:2401.10774, section 2.1): residual blocks on the actor's last hidden state, then an output layer.

Head k (from 1) stands at the position whose next token is t + 1 and predicts token t + k + 1. Both weights of a head are
split by rows over the tensor-parallel ranks. What a rank computes of a whole tensor's gradient is always its part, to be
summed over the group; the blocks pass such parts on, so one reduce-scatter a block is all that the backward says.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor, nn

from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.heads import OutputRows


def gather_features(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective over `group` (tensor-parallel). [n, H/t] of each rank -> [n, H].

    Its backward sums the ranks' parts of the gradient [n, H], of which each rank keeps its own columns.
    """
    return all_gather_last_dim_from_tensor_parallel_region(part, group=group)


class SplitWeight(nn.Module):
    """One weight of which this rank holds some rows, marked for megatron: else the gradient norm counts one rank's rows only."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=dtype))
        self.weight.tensor_model_parallel, self.weight.partition_dim, self.weight.partition_stride = True, 0, 1


class ResidualBlock(SplitWeight):
    """x + SiLU(W x), W [H, H] split by rows and zero at first: then the head says what the actor's own output layer says."""

    def __init__(self, hidden: int, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        super().__init__(hidden // group.size(), hidden, dtype)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Collective over the tensor-parallel group. [n, H] -> [n, H], both whole on every rank."""
        return x + gather_features(F.silu(F.linear(x, self.weight)), self.group)


class Head(nn.Module):
    """The residual blocks of one head."""

    def __init__(self, num_layers: int, hidden: int, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ResidualBlock(hidden, dtype, group) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Collective over the tensor-parallel group. [n, H] -> [n, H]."""
        for layer in self.layers:
            x = layer(x)
        return x


class MedusaHeads(MegatronModule):
    """All heads' weights on one rank, by the names of medusa/shape.py; none where not `present` (a pipeline stage before the last).

    padded_vocab: rows of the output layer over all tensor ranks, padding included.
    """

    def __init__(self, config: TransformerConfig, shape: HeadsShape, padded_vocab: int, group: dist.ProcessGroup, present: bool) -> None:
        super().__init__(config)
        self.shape, self.group = shape, group
        dtype = config.params_dtype
        num_heads = shape.num_heads if present else 0
        num_outputs = 0 if shape.shared_output else num_heads
        self.blocks = nn.ModuleList(Head(shape.num_layers, shape.hidden, dtype, group) for _ in range(num_heads))
        self.lm_heads = nn.ModuleList(SplitWeight(padded_vocab // group.size(), shape.hidden, dtype) for _ in range(num_outputs))

    def forward(self, rows: Tensor, head: int) -> Tensor:
        """Collective over the tensor-parallel group. What the output layer of `head` (from 0) reads: [n, H] of the actor's rows [n, H]."""
        return self.blocks[head](rows)

    def output(self, head: int, actors: Tensor) -> OutputRows:
        """This rank's rows of the output layer of `head` (from 0). actors [V_padded/t, H]: where shared, used without a gradient."""
        padded = actors.detach() if self.shape.shared_output else self.lm_heads[head].weight
        return OutputRows.of(padded, self.shape.vocab, self.group.rank())

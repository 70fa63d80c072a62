"""What a loss function gives to the passes. Imports neither megatron-core nor vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from rlhf_mc.models.heads import TokenLogprobs
    from rlhf_mc.parallel.packing import PackedMicrobatch


@dataclass(frozen=True)
class LossSum:
    """loss: scalar, the part of the global loss that a micro-batch adds (already divided by global counts).

    sums: name -> scalar, whatever is to be summed over all micro-batches of all ranks.
    """

    loss: Tensor
    sums: dict[str, Tensor]

    def plus(self, other: LossSum) -> LossSum:
        """Both losses, with the sums of both; their names must differ."""
        return LossSum(self.loss + other.loss, self.sums | other.sums)


@dataclass(frozen=True)
class Loss:
    """of: the LossSum of one micro-batch's answers.  names: of its sums, known on every rank, also on those without a head.

    Of a loss beside the model's own, `of` takes the rows [n, H] that the language head reads, in place of its answers.
    """

    names: tuple[str, ...]
    of: Callable[[TokenLogprobs | Tensor, PackedMicrobatch], LossSum]

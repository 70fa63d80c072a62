"""What the optimizer of a role steps on this rank, by the names of its parameters: all that training has made of the role."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor

from rlhf_mc.models.optimizer import megatron_parts
from rlhf_mc.models.role import Resident


@dataclass(frozen=True)
class Stepped:
    """A run of elements of one parameter, from element `start` of this rank's shard of it, which has `shape`.

    main: the fp32 values that are stepped; the parameter is a copy of them, or holds them itself.  state: AdamW's exp_avg and
    exp_avg_sq, of the same shape, and step, a scalar.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    main: Tensor
    state: dict[str, Tensor]

    @property
    def kinds(self) -> tuple[str, ...]:
        """main, and all of state."""
        return ("main", *self.state)

    def tensor(self, kind: str) -> Tensor:
        """The tensor of a kind."""
        return self.main if kind == "main" else self.state[kind]


def stepped(model: Resident) -> list[Stepped]:
    """Of a trained role. Over the data-parallel ranks, the distributed optimizer's are all elements of all parameters, each once; the
    plain one's are all on each rank.
    """
    names = {id(param): name for name, param in model.params().items()}
    return [
        Stepped(names[id(param)], tuple(param.shape), start, main, part.optimizer.state[main])
        for part in megatron_parts(model.optimizer)
        if part.optimizer is not None
        for param, start, main in _pairs(part)
    ]


def _pairs(part: MegatronOptimizer) -> Iterator[tuple[Tensor, int, Tensor]]:
    """(parameter, first element, what is stepped of it)"""
    if isinstance(part, FP32Optimizer):
        yield from ((param, 0, param) for group in part.optimizer.param_groups for param in group["params"])
    elif isinstance(part, DistributedOptimizer):
        copies = zip(part.model_float16_groups, part.shard_fp32_from_float16_groups)
        own = zip(part.model_fp32_groups, part.shard_fp32_groups)
        for params, mains in (*copies, *own):
            yield from ((param, part._get_model_param_range_map(param)["param"].start, main) for param, main in zip(params, mains))
    else:
        for params, mains in zip(part.float16_groups, part.fp32_from_float16_groups):
            yield from ((param, 0, main) for param, main in zip(params, mains))
        yield from ((param, 0, param) for group in part.fp32_from_fp32_groups for param in group)

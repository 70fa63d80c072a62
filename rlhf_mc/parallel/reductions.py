"""Sums over ranks: as the backend makes them, or in rank order, so that a sum has the same bits on every run and with every backend.

A backend's all-reduce may add in any order, by its ring or tree, by message size, by what the network does. In rank order, the
ranks exchange what they have and each adds ranks 0, 1, 2, ... one after another, in float32 where the numbers have fewer
bits. The bytes are those of a ring: an all-to-all (each rank adds up its share), then an all-gather of the shares; where
little is summed, one all-gather of everything, for the time is the number of messages then.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Up to this size a sum is one exchange of all numbers instead of two of shares.
_SMALL_BYTES = 1 << 16
_in_rank_order = False


def reduce_in_rank_order(active: bool) -> None:
    """From now on, this process sums as `active` says: in `all_reduce` and `reduce_scatter_tensor` here, and in megatron-core.

    All ranks must say the same. Active, torch takes deterministic kernels too, and warns of an operation that has none.
    """
    global _in_rank_order
    _in_rank_order = active
    torch.use_deterministic_algorithms(active, warn_only=True)
    if active:
        # cuBLAS reads it when its first handle is made, and sums in a fixed order with workspaces of a fixed size only.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Filling what is about to be overwritten finds bugs; it changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False


class _Done:
    """What an asynchronous collective returns, of one that is over already."""

    def wait(self) -> None:
        pass


def _sum_of(parts: Tensor) -> Tensor:
    """parts [ranks, n] -> [n]. Each addition rounds once; what has fewer bits than float32 is rounded to them at the end."""
    dtype = parts.dtype
    wider = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    total = parts[0].to(wider, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def _sum_shares(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Collective over `group`. values [ranks, n], one share for each rank -> [n], the sum of this rank's share."""
    received = torch.empty_like(values)
    dist.all_to_all_single(received, values, group=group)
    return _sum_of(received)


def _all_reduce_in_order(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    ranks, flat = dist.get_world_size(group), tensor.detach().reshape(-1)
    if flat.numel() * flat.element_size() <= _SMALL_BYTES:
        gathered = flat.new_empty(ranks * flat.numel())
        dist.all_gather_into_tensor(gathered, flat, group=group)
        total = _sum_of(gathered.view(ranks, -1))
    else:
        share = -(-flat.numel() // ranks)
        padded = torch.nn.functional.pad(flat, (0, share * ranks - flat.numel()))
        whole = torch.empty_like(padded)
        dist.all_gather_into_tensor(whole, _sum_shares(padded.view(ranks, share), group), group=group)
        total = whole[: flat.numel()]
    tensor.detach().copy_(total.view_as(tensor))


def _is_sum_in_order(op: dist.ReduceOp, group: dist.ProcessGroup | None) -> bool:
    return _in_rank_order and op == dist.ReduceOp.SUM and dist.get_world_size(group) > 1


def all_reduce(
    tensor: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Collective over `group`. torch.distributed.all_reduce; a sum in rank order where that was asked for."""
    if not _is_sum_in_order(op, group):
        return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)
    _all_reduce_in_order(tensor, group)
    return _Done() if async_op else None


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Collective over `group`. torch.distributed.reduce_scatter_tensor; a sum in rank order where that was asked for."""
    if not _is_sum_in_order(op, group):
        return dist.reduce_scatter_tensor(output, input, op=op, group=group, async_op=async_op)
    # The output may be the rank's own share of the input, which all_to_all has sent by the time it is written.
    output.copy_(_sum_shares(input.detach().reshape(dist.get_world_size(group), -1), group).view_as(output))
    return _Done() if async_op else None


@contextlib.contextmanager
def _coalescing(group: dist.ProcessGroup | None, async_ops: bool = False, **others: Any) -> Iterator[Any]:
    """torch's manager keeps collectives back until its end; a sum in rank order needs what they bring at once."""
    if _in_rank_order:
        yield _Done()
    else:
        with dist._coalescing_manager(group, async_ops=async_ops, **others) as manager:
            yield manager


class _View(ModuleType):
    """A module as megatron-core sees it: `seen`, with some attributes of ours."""

    def __init__(self, seen: ModuleType, **ours: Any) -> None:
        super().__init__(seen.__name__)
        self.__dict__.update(ours, _seen=seen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seen, name)


def show_reductions_to_megatron() -> None:
    """Where sums are in rank order: gives every loaded megatron module ours by the names under which it calls torch's.

    torch stays as it is for all others. Later, in a process that sums by its backend again, ours do as torch's.
    """
    if not _in_rank_order:
        return
    distributed = _View(dist, all_reduce=all_reduce, reduce_scatter_tensor=reduce_scatter_tensor)
    ours = {"dist_reduce_scatter_func": reduce_scatter_tensor, "_coalescing_manager": _coalescing}
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("megatron."):
            continue
        seen = getattr(module, "torch", None)
        if isinstance(seen, ModuleType) and not isinstance(seen, _View):
            module.torch = _View(seen, distributed=distributed)
        for name in ours.keys() & vars(module).keys():
            setattr(module, name, ours[name])

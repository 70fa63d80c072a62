"""Log-probs, entropy and top-1 hits over a vocabulary that is split over the tensor-parallel ranks, from hidden states.

The logits exist one chunk of tokens at a time, in forward and in backward; what crosses ranks is four numbers a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mc.parallel.logits_chunk import chunk_tokens
from rlhf_mc.parallel.reductions import all_reduce


@dataclass(frozen=True)
class Banned:
    """positions: bool[n], where `tokens` could not be drawn, as before the minimum length of a response."""

    positions: Tensor
    tokens: tuple[int, ...]


class TargetStatistics(NamedTuple):
    """logprobs: float32[n] of the targets.  entropy: float32[n] of the distributions.  hits: bool[n], no token is likelier than the target.

    Float64 for float64 input. hits has no gradient.
    """

    logprobs: Tensor
    entropy: Tensor
    hits: Tensor


@dataclass(frozen=True)
class _Scope:
    first_row: int
    temperature: float
    group: dist.ProcessGroup
    banned_tokens: tuple[int, ...]


def _chunks(num_tokens: int, num_rows: int) -> list[slice]:
    size = chunk_tokens(num_rows)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _target_rows(targets: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """(row of the target in this rank's shard, clamped; whether the shard has it)."""
    local = targets - first_row
    present = (local >= 0) & (local < num_rows)
    return local.clamp(0, max(0, num_rows - 1)), present


def _logits(hidden: Tensor, weight: Tensor, scope: _Scope, banned: Tensor | None) -> Tensor:
    """[n, rows] of this shard, at least float32, divided by the temperature, banned entries at -1e30 (finite: 0 * inf is NaN)."""
    logits = hidden @ weight.t()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if scope.temperature != 1.0:
        logits = logits.div_(scope.temperature)
    local = [token - scope.first_row for token in scope.banned_tokens if 0 <= token - scope.first_row < weight.size(0)]
    if banned is not None and local:
        logits[:, local] = torch.where(banned[:, None], -1e30, logits[:, local])
    return logits


def _local_statistics(logits: Tensor, rows: Tensor, present: Tensor) -> Tensor:
    """[4, n]: of this shard's logits x, max m, sum e^(x-m), sum x e^(x-m), and the target's x (0 where absent)."""
    if logits.size(1) == 0:
        absent = logits.new_zeros(4, logits.size(0))
        absent[0] = -torch.inf
        return absent
    top = logits.amax(dim=1)
    target = torch.where(present, logits.gather(1, rows[:, None]).squeeze(1), 0.0)
    mass = (logits - top[:, None]).exp_()
    mass_sum = mass.sum(dim=1)
    return torch.stack((top, mass_sum, mass.mul_(logits).sum(dim=1), target))


def _combine(statistics: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective over `group` (tensor-parallel). [4, n] of each shard -> of the whole vocabulary."""
    if group.size() == 1:
        return statistics
    top = statistics[0].clone()
    all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    scale = (statistics[0] - top).exp()
    sums = torch.stack((statistics[1] * scale, statistics[2] * scale, statistics[3]))
    all_reduce(sums, group=group)
    return torch.cat((top[None], sums))


def _logits_to_gradient(
    logits: Tensor,
    rows: Tensor,
    present: Tensor,
    log_normaliser: Tensor,
    mean_logit: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """The gradient by the logits x [n, rows], in their place; all else is [n].

    d logprob / d x_j = [j is target] - p_j;  d entropy / d x_j = -p_j (x_j - mean_logit)
    """
    slope = -grad_logprob[:, None]
    if grad_entropy is not None:
        slope = (mean_logit[:, None] - logits).mul_(grad_entropy[:, None]).add_(slope)
    grad = logits.sub_(log_normaliser[:, None]).exp_().mul_(slope)
    return grad.scatter_add_(1, rows[:, None], torch.where(present, grad_logprob, 0.0)[:, None])


class _VocabularyParallelLogProbs(torch.autograd.Function):
    """(log-prob of the target, entropy, hit), each [n], with a backward that computes the logits again by chunks."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, banned: Tensor | None, scope: _Scope):
        rows, present = _target_rows(targets, scope.first_row, weight.size(0))
        parts = [
            _local_statistics(_logits(hidden[c], weight, scope, _at(banned, c)), rows[c], present[c])
            for c in _chunks(hidden.size(0), weight.size(0))
        ]
        top, mass, weighted, target = _combine(torch.cat(parts, dim=1) if parts else hidden.new_zeros(4, 0).float(), scope.group)
        log_normaliser = top + mass.log()
        mean_logit = weighted / mass
        ctx.save_for_backward(hidden, weight, rows, present, log_normaliser, mean_logit, banned)
        ctx.scope = scope
        hits = target >= top
        ctx.mark_non_differentiable(hits)
        return target - log_normaliser, log_normaliser - mean_logit, hits

    @staticmethod
    def backward(ctx, grad_logprob: Tensor, grad_entropy: Tensor, _: Tensor | None):
        hidden, weight, rows, present, log_normaliser, mean_logit, banned = ctx.saved_tensors
        if weight.size(0) == 0:
            return torch.zeros_like(hidden), torch.zeros_like(weight), None, None, None
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        by_logit = grad_logprob / ctx.scope.temperature, grad_entropy / ctx.scope.temperature if grad_entropy.any() else None
        for c in _chunks(hidden.size(0), weight.size(0)):
            of_tokens = (_at(values, c) for values in (rows, present, log_normaliser, mean_logit, *by_logit))
            grad = _logits_to_gradient(_logits(hidden[c], weight, ctx.scope, _at(banned, c)), *of_tokens).to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[c])
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), hidden[c])
            del grad  # before the next chunk's logits are made
        return grad_hidden, grad_weight, None, None, None


def _at(values: Tensor | None, chunk: slice) -> Tensor | None:
    return None if values is None else values[chunk]


def vocabulary_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    first_row: int,
    temperature: float,
    group: dist.ProcessGroup,
    banned: Banned | None = None,
) -> TargetStatistics:
    """Collective over `group` (tensor-parallel). Log-prob of each target, entropy of each distribution, and whether the target is its top.

    hidden [n, H], the same on all ranks of the group; its gradient is this rank's part, to be summed over the group.
    weight [rows, H]: this rank's rows of the output layer from vocabulary row `first_row`, without padding (may be empty).
    targets int64[n].  temperature divides the logits.  banned: tokens that could not be drawn at some positions.
    """
    scope = _Scope(first_row, temperature, group, () if banned is None else banned.tokens)
    positions = None if banned is None else banned.positions
    return TargetStatistics(*_VocabularyParallelLogProbs.apply(hidden, weight, targets, positions, scope))

"""Log-probs and entropy over a vocabulary that is split over the tensor-parallel ranks, from hidden states.

The logits exist one chunk of tokens at a time, in forward and in backward; what crosses ranks is four numbers a token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

# Logits of one chunk, in elements: bounds the extra memory to about ten times this many bytes.
_CHUNK_ELEMENTS = 1 << 24


def _chunks(num_tokens: int, num_rows: int) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // max(1, num_rows))
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _target_rows(targets: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """(row of the target in this rank's shard, clamped; whether the shard has it)."""
    local = targets - first_row
    present = (local >= 0) & (local < num_rows)
    return local.clamp(0, max(0, num_rows - 1)), present


def _local_statistics(hidden: Tensor, weight: Tensor, rows: Tensor, present: Tensor, temperature: float) -> Tensor:
    """float32[4, n]: of this shard's logits x, max m, sum e^(x-m), sum x e^(x-m), and the target's x (0 where absent)."""
    if weight.size(0) == 0:
        absent = hidden.new_zeros(4, hidden.size(0), dtype=torch.float32)
        absent[0] = -torch.inf
        return absent
    logits = (hidden @ weight.t()).float().div_(temperature)
    top = logits.amax(dim=1)
    target = torch.where(present, logits.gather(1, rows[:, None]).squeeze(1), 0.0)
    mass = (logits - top[:, None]).exp_()
    return torch.stack((top, mass.sum(dim=1), torch.linalg.vecdot(mass, logits), target))


def _combine(statistics: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective over `group` (tensor-parallel). float32[4, n] of each shard -> of the whole vocabulary."""
    if group.size() == 1:
        return statistics
    top = statistics[0].clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    scale = (statistics[0] - top).exp()
    sums = torch.stack((statistics[1] * scale, statistics[2] * scale, statistics[3]))
    dist.all_reduce(sums, group=group)
    return torch.cat((top[None], sums))


class _VocabularyParallelLogProbs(torch.autograd.Function):
    """(log-prob of the target, entropy), both float32[n], with a backward that computes the logits again by chunks."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, first_row: int, temperature: float, group: dist.ProcessGroup):
        rows, present = _target_rows(targets, first_row, weight.size(0))
        parts = [
            _local_statistics(hidden[c], weight, rows[c], present[c], temperature) for c in _chunks(hidden.size(0), weight.size(0))
        ]
        top, mass, weighted, target = _combine(torch.cat(parts, dim=1) if parts else hidden.new_zeros(4, 0).float(), group)
        log_normaliser = top + mass.log()
        mean_logit = weighted / mass
        ctx.save_for_backward(hidden, weight, rows, present, log_normaliser, mean_logit)
        ctx.temperature, ctx.group = temperature, group
        return target - log_normaliser, log_normaliser - mean_logit

    @staticmethod
    def backward(ctx, grad_logprob: Tensor, grad_entropy: Tensor):
        hidden, weight, rows, present, log_normaliser, mean_logit = ctx.saved_tensors
        if weight.size(0) == 0:
            return torch.zeros_like(hidden), torch.zeros_like(weight), None, None, None, None
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        with_entropy = bool(grad_entropy.any())
        for c in _chunks(hidden.size(0), weight.size(0)):
            # d logprob / d x_j = [j is target] - p_j;  d entropy / d x_j = -p_j (x_j - mean_logit)
            logits = (hidden[c] @ weight.t()).float().div_(ctx.temperature)
            probs = (logits - log_normaliser[c, None]).exp_()
            if with_entropy:
                slope = grad_logprob[c, None] + grad_entropy[c, None] * logits.sub_(mean_logit[c, None])
            else:
                slope = grad_logprob[c, None]
            grad = probs.mul_(slope).neg_()
            grad.scatter_add_(1, rows[c, None], torch.where(present[c], grad_logprob[c], 0.0)[:, None])
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[c])
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), hidden[c])
        return grad_hidden, grad_weight, None, None, None, None


def vocabulary_parallel_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, first_row: int, temperature: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Collective over `group` (tensor-parallel). Log-prob of each target and entropy of each distribution.

    hidden [n, H], the same on all ranks of the group; its gradient is this rank's part, to be summed over the group.
    weight [rows, H]: this rank's rows of the output layer from vocabulary row `first_row`, without padding (may be empty).
    targets int64[n].  temperature divides the logits.  Returns float32[n], float32[n].
    """
    return _VocabularyParallelLogProbs.apply(hidden, weight, targets, first_row, temperature, group)

"""Context parallel: which tokens of the packed sequences each rank of a context group holds, and what it tells the others.

Of every sequence a rank holds two chunks: one of the first half and its mirror image in the second, as in megatron-core's
load balancing. A token looks at all before it, so early and late chunks together make the same causal work for every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mc.batch import offsets_of, ragged_arange


@dataclass(frozen=True)
class Context:
    """This rank's place among the `size` ranks that share its sequences. group: for tensors on the device; None where it is alone."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


ALONE = Context()


@dataclass(frozen=True)
class ContextCut:
    """Packed sequences, T tokens of B sequences, cut over a context group; everything on the host.

    lengths: int64[B].
    starts, sizes: int64[ranks, B, 2], of the two chunks of each sequence that a rank holds; positions in the sequence, and tokens.
    held: int64[ranks, T / ranks], which of the T tokens lie on each rank, in their order there. It ascends: a rank keeps the
    order of the sequences, and of the tokens in each.
    """

    lengths: Tensor
    starts: Tensor
    sizes: Tensor
    held: Tensor

    @property
    def home(self) -> Tensor:
        """int64[T], where each token lies when the tokens of all ranks are gathered, rank after rank."""
        return self.held.flatten().argsort()

    def positions(self, rank: int) -> Tensor:
        """int64[T / ranks], the position of each token of the rank in its own sequence."""
        return ragged_arange(self.lengths)[self.held[rank]]

    def on_rank(self, places: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Of `places`, int64[n] among the T tokens: which lie on the rank, as indices int64[m] into `places`, and where there."""
        num_tokens = self.held.size(1)
        local = self.home[places] - rank * num_tokens
        mine = ((local >= 0) & (local < num_tokens)).nonzero().squeeze(1)
        return mine, local[mine]


def cut_sequences(lengths: Tensor, num_ranks: int = 1) -> ContextCut:
    """The cut of sequences of these lengths (int64[B]), whose sum is a multiple of `num_ranks`.

    Chunks are uneven rather than padded: a sequence gives each rank its tokens / num_ranks, and where that leaves a remainder
    it goes to other ranks than that of the sequence before, so that all ranks hold equally many tokens in the end. The
    packed tokens are then padded once, for all sequences together. Of a sequence shorter than num_ranks some ranks hold nothing.
    Raises ValueError where the sum has a remainder.
    """
    total = int(lengths.sum())
    if total % num_ranks:
        raise ValueError(f"{total} tokens cannot be cut evenly over {num_ranks} context ranks")
    offsets = offsets_of(lengths)
    # floor((x + r) / n) over r = 0..n-1 sums to x (Hermite), so these shares sum to each length, and to total / n on each rank.
    shares = ((offsets[None] + torch.arange(num_ranks)[:, None]) // num_ranks).diff(dim=1)
    heads = shares if num_ranks == 1 else shares // 2
    tails = shares - heads
    before_heads = heads.cumsum(0) - heads
    before_tails = heads.sum(0) + tails.sum(0) - tails.cumsum(0)
    starts, sizes = torch.stack((before_heads, before_tails), dim=2), torch.stack((heads, tails), dim=2)
    held = [_tokens_of(offsets, s, n) for s, n in zip(starts, sizes)]
    return ContextCut(lengths, starts, sizes, torch.stack(held))


def _tokens_of(offsets: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
    """starts, sizes: [B, 2] of one rank."""
    counts = sizes.flatten()
    first = (offsets[:-1, None] + starts).flatten()
    return first.repeat_interleave(counts) + ragged_arange(counts)


class _Exchange(torch.autograd.Function):
    """The numbers of all ranks, each at its place. Every rank makes the same of them, so each keeps its own part of the gradient."""

    @staticmethod
    def forward(ctx, mine: Tensor, places: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        whole = mine.new_zeros(total)
        whole[places] = mine
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, grad: Tensor):
        (places,) = ctx.saved_tensors
        return grad[places], None, None, None


def exchange_numbers(mine: Tensor, places: Tensor, total: int, context: Context) -> Tensor:
    """Collective over the context group. [total], the numbers of all its ranks; the same on each, which must use them alike.

    mine [n]: this rank's, which belong at places int64[n] of the `total`; each place is one rank's.
    """
    return mine if context.size == 1 else _Exchange.apply(mine, places, total, context.group)

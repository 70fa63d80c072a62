"""Drawing tokens: each draw is a function of the sample's seed, the token's place in the response, and the distribution. Pure torch.

So a sample does not depend on what is sampled beside it, on which replica, or on how many tokens a step of the engine checks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_BLOCK = 256  # tokens of the vocabulary that are summed before the search: a running sum over all of it in float64 takes three times as long


def uniforms(seeds: Sequence[int], places: Sequence[int]) -> Tensor:
    """float64[n] in [0, 1): output number `place` of the generator SplitMix64 (Steele, Lea, Flood 2014) seeded with `seed`.

    seeds in [0, 2**64).
    """
    z = numpy.array(seeds, dtype=numpy.uint64)
    z = z + numpy.array(places, dtype=numpy.uint64) * numpy.uint64(_GOLDEN_GAMMA) + numpy.uint64(_GOLDEN_GAMMA)
    z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    z = z ^ (z >> numpy.uint64(31))
    return torch.from_numpy((z >> numpy.uint64(12)).astype(numpy.float64) * 2.0**-52)


def draw(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """int64[n]: of each row of log-probs [n, V], the first token at which the sum of probabilities exceeds `uniform` (float64[n]).

    The inverse of the distribution function: exact to the rounding of the float32 log-probs, since sums are in float64. A token of
    probability 0 is never drawn. Where log-probs are NaN, so is that of the token, whichever it is.
    """
    blocks = _blocks(logprobs).exp()
    sums = blocks.sum(2, dtype=torch.float64).cumsum(1)
    wanted = uniform[:, None] * sums[:, -1:]
    block = torch.searchsorted(sums, wanted, right=True).clamp_(max=sums.size(1) - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = _one_each(blocks, block).cumsum(1, dtype=torch.float64)
    # Sums of a block's parts may round below the block's own sum: then its last token that has a probability is the one.
    last = torch.searchsorted(inside, inside[:, -1:].contiguous())
    token = torch.minimum(torch.searchsorted(inside, wanted - before, right=True), last)
    return (block * _BLOCK + token).squeeze(1).clamp_(max=logprobs.size(1) - 1)


def likeliest(scores: Tensor) -> Tensor:
    """int64[n]: of each row [n, V] the first of the largest. On CPU many times as fast as torch's argmax over a whole vocabulary."""
    blocks = _blocks(scores)
    block = blocks.amax(2).argmax(1, keepdim=True)
    return (block * _BLOCK + _one_each(blocks, block).argmax(1, keepdim=True)).squeeze(1)


def _blocks(rows: Tensor) -> Tensor:
    """[n, V] -> [n, blocks, _BLOCK], filled up with -inf."""
    return torch.nn.functional.pad(rows, (0, -rows.size(1) % _BLOCK), value=-torch.inf).unflatten(1, (-1, _BLOCK))


def _one_each(blocks: Tensor, chosen: Tensor) -> Tensor:
    """[n, _BLOCK]: of each row its block of that number, int64[n, 1]."""
    return blocks.gather(1, chosen[..., None].expand(-1, -1, _BLOCK)).squeeze(1)

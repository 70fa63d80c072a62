"""Which samples of an iteration each optimizer step of the heads trains on: the same on every layout. Pure; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy

# Makes the shuffle another than that of the mini-batches, which is drawn from (seed, iteration, epoch).
_SHUFFLE = 2**32 - 1


def samples_of_steps(num_samples: int, steps: int, seed: int, iteration: int) -> list[list[int]]:
    """The samples that each step may take, in the order in which it takes them: all of them, shuffled and dealt out to the steps.

    A function of its arguments. At most `steps` lists, none empty.
    """
    order = numpy.random.default_rng((seed, iteration, _SHUFFLE)).permutation(num_samples).tolist()
    return [order[step::steps] for step in range(min(steps, num_samples))]


def first_within(samples: Sequence[int], num_rows: Mapping[int, int], step_tokens: int | None) -> list[int]:
    """The first of `samples` that have `num_rows` rows, at most `step_tokens` together; the very first in any case. None: no limit.

    Of the samples that a rank has seen so far, it leaves out none that it gives when all samples of all ranks are known.
    """
    chosen: list[int] = []
    total = 0
    for sample in (s for s in samples if num_rows.get(s)):
        total += num_rows[sample]
        if chosen and step_tokens is not None and total > step_tokens:
            break
        chosen.append(sample)
    return chosen

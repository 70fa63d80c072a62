"""Which sequences go through the model together, on which data-parallel rank. Pure functions; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_mc.config import MicroBatch
from rlhf_mc.parallel.balance import share_out


@dataclass(frozen=True)
class PlannedMicrobatch:
    """Sequence numbers that are packed together. `fill`: it repeats another's sequence, to keep counts equal, and weighs 0."""

    sequences: tuple[int, ...]
    fill: bool = False


def _check_fits(units: Sequence[int], budget: MicroBatch, together: int) -> None:
    """ValueError where a micro-batch cannot hold what must share one."""
    if budget.sequences is not None and budget.sequences < together:
        raise ValueError(f"micro_batch.sequences = {budget.sequences} cannot hold the {together} that stay together; raise it")
    longest = int(np.argmax(units))
    if budget.tokens is not None and units[longest] > budget.tokens:
        first, last = longest * together, longest * together + together - 1
        who = f"sequence {first} has" if together == 1 else f"sequences {first} to {last} have"
        raise ValueError(
            f"{who} {units[longest]} tokens, more than the {budget.tokens} tokens of a micro-batch; "
            "raise micro_batch.tokens, or shorten data.max_prompt_tokens, rollout.max_tokens or supervised.max_tokens"
        )


def plan_microbatches(
    lengths: Sequence[int], costs: Sequence[float], budget: MicroBatch, num_ranks: int, together: int = 1, multiple: int = 1
) -> list[list[PlannedMicrobatch]]:
    """For each of `num_ranks` data-parallel ranks, its micro-batches, the dearest first.

    lengths: tokens of each sequence.  costs: of each sequence, positive, in any unit (`SequenceCost.of`).
    Invariants: every sequence is in exactly one micro-batch that is not a fill; `together` neighbouring sequences (from
    a multiple of it) share one; no micro-batch exceeds the budget; all ranks have the same number of micro-batches, a
    multiple of `multiple`, at least one; fewer than num_ranks * multiple are fills; the plan depends on the arguments only. As far
    as the budget and the lengths allow, all ranks cost alike, and so do their k-th micro-batches.
    Raises ValueError, naming it, for a sequence (or neighbours together) that the budget cannot hold, and for `lengths` that
    are empty or have a remainder by `together`.
    """
    if not len(lengths) or len(lengths) % together:
        raise ValueError(f"cannot plan micro-batches of {len(lengths)} sequences, {together} together")
    unit_lengths, unit_costs = _of_units(lengths, together), _of_units(costs, together)
    _check_fits(unit_lengths, budget, together)
    by_tokens = budget.tokens is not None
    sizes, capacity = (unit_lengths, budget.tokens) if by_tokens else ([together] * len(unit_lengths), budget.sequences)
    ranks = share_out(sizes, unit_costs, capacity, num_ranks, multiple)
    cheapest = int(np.argmin(unit_costs))
    fill = PlannedMicrobatch(_members([cheapest], together), fill=True)
    return [[PlannedMicrobatch(_members(units, together)) if units else fill for units in bins] for bins in ranks]


def _of_units(values: Sequence[float], together: int) -> list[float]:
    """Sums over the sequences that stay together."""
    return np.asarray(values).reshape(-1, together).sum(axis=1).tolist()


def _members(units: list[int], together: int) -> tuple[int, ...]:
    return tuple(u * together + k for u in units for k in range(together))


def arrivals(num_microbatches: int, pipeline: int, virtual: int, leads: bool) -> list[int]:
    """Which micro-batches' hidden states a pipeline stage receives from the stage before it, in the order in which they come.

    `pipeline` micro-batches at a time go through the chunks of all stages, `virtual` times around (arXiv:2104.04473, section 2.2); with
    one chunk a stage, that is 1F1B's order. leads: of the first stage, which gets from the last what goes around once more.
    Gradients come back in the same order, from the stage after; there it is the last stage that leads.
    """
    turns = virtual - 1 if leads else virtual
    return [
        microbatch
        for first in range(0, num_microbatches, pipeline)
        for _ in range(turns)
        for microbatch in range(first, min(first + pipeline, num_microbatches))
    ]

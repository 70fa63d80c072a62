"""Which sequences go through the model together, on which data-parallel rank. Pure functions; no torch.distributed."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_mc.config import MicroBatch


@dataclass(frozen=True)
class PlannedMicrobatch:
    """Sequence numbers that are packed together. `fill`: it repeats another's sequence, to keep counts equal, and weighs 0."""

    sequences: tuple[int, ...]
    fill: bool = False


def _first_fit_decreasing(order: list[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    space: list[int] = []
    for index in order:
        for b, free in enumerate(space):
            if lengths[index] <= free:
                bins[b].append(index)
                space[b] -= lengths[index]
                break
        else:
            bins.append([index])
            space.append(capacity - lengths[index])
    return bins


def _balanced(order: list[int], lengths: Sequence[int], capacity: int, num_bins: int) -> list[list[int]] | None:
    """Longest first to the emptiest bin; None where that breaks the capacity."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]
    for index in order:
        load, b = heapq.heappop(heap)
        if load + lengths[index] > capacity:
            return None
        bins[b].append(index)
        heapq.heappush(heap, (load + lengths[index], b))
    return bins


def _check_fits(units: Sequence[int], budget: MicroBatch, together: int) -> None:
    """ValueError where a micro-batch cannot hold what must share one."""
    if budget.sequences is not None and budget.sequences < together:
        raise ValueError(f"micro_batch.sequences = {budget.sequences} cannot hold the {together} that stay together; raise it")
    longest = max(range(len(units)), key=lambda u: units[u])
    if budget.tokens is not None and units[longest] > budget.tokens:
        first, last = longest * together, longest * together + together - 1
        who = f"sequence {first} has" if together == 1 else f"sequences {first} to {last} have"
        raise ValueError(
            f"{who} {units[longest]} tokens, more than the {budget.tokens} tokens of a micro-batch; "
            "raise micro_batch.tokens, or shorten data.max_prompt_tokens, rollout.max_tokens or supervised.max_tokens"
        )


def _by_tokens(lengths: Sequence[int], capacity: int, num_ranks: int) -> list[list[int]]:
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    packed = _first_fit_decreasing(order, lengths, capacity)
    num_bins = -(-max(1, len(packed)) // num_ranks) * num_ranks
    return _balanced(order, lengths, capacity, num_bins) or packed


def _by_count(lengths: Sequence[int], count: int, num_ranks: int) -> list[list[int]]:
    num_bins = -(-max(1, -(-len(lengths) // count)) // num_ranks) * num_ranks
    return [[i for i in range(b, len(lengths), num_bins)] for b in range(num_bins)]


def plan_microbatches(
    lengths: Sequence[int], budget: MicroBatch, num_ranks: int, together: int = 1
) -> list[list[PlannedMicrobatch]]:
    """For each of `num_ranks` data-parallel ranks, its micro-batches.

    Invariants: every sequence is in exactly one micro-batch that is not a fill; `together` neighbouring sequences (from
    a multiple of it) share one; no micro-batch exceeds the budget; all ranks have the same number of micro-batches, at
    least one; the plan depends on the arguments only.
    Raises ValueError, naming it, for a sequence (or neighbours together) that the budget cannot hold, and for `lengths` that
    are empty or have a remainder by `together`.
    """
    if not lengths or len(lengths) % together:
        raise ValueError(f"cannot plan micro-batches of {len(lengths)} sequences, {together} together")
    units = [sum(lengths[u : u + together]) for u in range(0, len(lengths), together)]
    _check_fits(units, budget, together)
    if budget.sequences is not None:
        bins = _by_count(units, budget.sequences // together, num_ranks)
    else:
        bins = _by_tokens(units, budget.tokens, num_ranks)
    filled = sorted((b for b in bins if b), key=lambda b: (-sum(units[u] for u in b), b))
    shortest = min(range(len(units)), key=lambda u: (units[u], u))
    microbatches = [PlannedMicrobatch(_members(b, together)) for b in filled]
    microbatches += [PlannedMicrobatch(_members([shortest], together), fill=True)] * (-len(microbatches) % num_ranks)
    return [microbatches[rank::num_ranks] for rank in range(num_ranks)]


def _members(units: list[int], together: int) -> tuple[int, ...]:
    return tuple(u * together + k for u in sorted(units) for k in range(together))

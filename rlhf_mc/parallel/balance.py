"""What a sequence costs, and how units of unequal cost are shared out evenly. Pure functions; no torch.

Ranks wait for the slowest one, so the heaviest rank's cost is what counts. It cannot be less than the mean over the ranks, nor less
than the dearest unit. Costs are compared as whole numbers, whose sums are exact: all ranks must find the very same plan, on any CPU.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

_COST_STEPS = 1 << 30  # the dearest unit in whole numbers: 2^33 units like it can be summed in an int64
_EVEN = 1.002  # exchanges go on until the heaviest rank is within this of the bound
_EVEN_ENOUGH = 1.01  # one more micro-batch a rank costs about as much as an imbalance below this
_EXCHANGES = 16  # a rank at most, on average
_PLANS = 3  # numbers of micro-batches that are tried for the sake of balance


@dataclass(frozen=True)
class SequenceCost:
    """FLOPs of one forward pass on the pipeline stage that has most to do; a backward pass multiplies all terms alike.

    per_token: linear layers, for each token.  per_pair: attention, for each query and key that it looks at.
    per_answer: the head, for each number asked of the model.  window: tokens that a query looks at, or None for all before it.
    """

    per_token: int
    per_pair: int
    per_answer: int
    window: int | None

    def of(self, lengths: Sequence[int], answers: Sequence[int]) -> np.ndarray:
        """float64[B] of sequences with so many tokens, of which so many numbers are asked."""
        s = np.asarray(lengths, dtype=np.float64)
        seen = s if self.window is None else np.minimum(s, self.window)
        pairs = seen * (seen + 1) / 2 + (s - seen) * seen
        return self.per_token * s + self.per_pair * pairs + self.per_answer * np.asarray(answers, dtype=np.float64)


@dataclass(frozen=True)
class _Units:
    """What is shared out, the dearest first. sizes: int64[n], of which a bin holds `capacity`.  costs: int64[n]."""

    sizes: np.ndarray
    costs: np.ndarray
    capacity: int


def share_out(
    sizes: Sequence[int], costs: Sequence[float], capacity: int, num_ranks: int, multiple: int = 1
) -> list[list[list[int]]]:
    """For each rank, its bins of unit numbers, the dearest first: as many for every rank, a multiple of `multiple`, and fewer than
    num_ranks * multiple in all of them empty.

    Each unit is in one bin; no bin's sizes exceed `capacity` (no unit's may). The heaviest rank costs as little as is found;
    bins cost as much as each other as far as that allows, and so do the k-th bins of all ranks. There are as few bins as best-fit
    needs, or a few more a rank where they leave too little room to balance. costs: positive.
    """
    costs = np.asarray(costs, dtype=np.float64)
    whole = np.rint(costs * (_COST_STEPS / costs.max())).astype(np.int64)
    order = np.argsort(-whole, kind="stable")
    units = _Units(np.asarray(sizes, dtype=np.int64)[order], whole[order], capacity)
    bin_of = np.empty_like(order)
    bin_of[order] = _dearest_first(units, _most_even(units, num_ranks, multiple), num_ranks)
    per_rank = _round_up(_bins_a_rank(bin_of, num_ranks), multiple)
    ranks: list[list[list[int]]] = [[[] for _ in range(per_rank)] for _ in range(num_ranks)]
    for number, b in enumerate(bin_of.tolist()):
        ranks[b % num_ranks][b // num_ranks].append(number)
    return ranks


# A plan is bin_of: int64[n], the bin of each unit. Bin b is the (b // num_ranks)-th of rank b % num_ranks.


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _bins_a_rank(bin_of: np.ndarray, num_ranks: int) -> int:
    return int(bin_of.max()) // num_ranks + 1  # up to the last that is not empty on all ranks


def _sums(values: np.ndarray, at: np.ndarray, num: int) -> np.ndarray:
    """int64[num], the sum of the values at each place. Exact below 2^53."""
    return np.bincount(at, values, num).astype(np.int64)


def _most_even(units: _Units, num_ranks: int, multiple: int) -> np.ndarray:
    """The first plan that is even enough, or the most even one of those tried."""
    bound = max(int(units.costs.sum()) / num_ranks, int(units.costs[0]))
    plans = []
    for bin_of in islice(_plans(units, num_ranks, multiple), _PLANS):
        heaviest = _even_out(units, bin_of, num_ranks, _EVEN * bound)
        plans.append((heaviest, len(plans), bin_of))
        if heaviest <= _EVEN_ENOUGH * bound:
            break
    return min(plans)[-1]


def _plans(units: _Units, num_ranks: int, multiple: int) -> Iterator[np.ndarray]:
    """Plans with as few bins as work, then with more, up to one for each unit."""
    most = _round_up(len(units.sizes), num_ranks * multiple) // num_ranks
    per_rank = _round_up(_best_fit(units), num_ranks * multiple) // num_ranks
    while per_rank <= most:
        bin_of = _spread(units, per_rank * num_ranks)
        if bin_of is not None:
            yield _bins_to_ranks(units, bin_of, per_rank, num_ranks)
            per_rank += multiple
        else:
            # With a bin for each unit, all find room.
            per_rank = min(_round_up(per_rank + 1 + per_rank // 50, multiple), most)


def _best_fit(units: _Units) -> int:
    """How many bins best-fit decreasing takes."""
    rooms: list[int] = []  # without repeats, ascending
    num_with = Counter()
    for size in sorted(units.sizes.tolist(), reverse=True):
        at = bisect_left(rooms, size)
        room = rooms[at] if at < len(rooms) else units.capacity
        if at < len(rooms):
            num_with[room] -= 1
            if not num_with[room]:
                del rooms[at]
        if not num_with[room - size]:
            insort(rooms, room - size)
        num_with[room - size] += 1
    return num_with.total()


def _spread(units: _Units, num_bins: int) -> np.ndarray | None:
    """bin_of: dearest first, each unit into the cheapest bin with room for it; None where one finds no room."""
    bin_of: list[int] = []
    rooms = [units.capacity] * num_bins
    waiting = [(0, b) for b in range(num_bins)]  # heap of (cost, bin)
    full: list[tuple[int, int, int]] = []  # heap of (-room, cost, bin): had no room for an earlier unit
    for size, cost in zip(units.sizes.tolist(), units.costs.tolist()):
        while full and -full[0][0] >= size:
            heapq.heappush(waiting, heapq.heappop(full)[1:])
        while waiting and rooms[waiting[0][1]] < size:
            load, b = heapq.heappop(waiting)
            heapq.heappush(full, (-rooms[b], load, b))
        if not waiting:
            return None
        load, b = waiting[0]
        bin_of.append(b)
        rooms[b] -= size
        heapq.heapreplace(waiting, (load + cost, b))
    return np.array(bin_of)


def _bins_to_ranks(units: _Units, bin_of: np.ndarray, per_rank: int, num_ranks: int) -> np.ndarray:
    """The same bins, numbered anew: those that cost alike are the k-th of their ranks, and ranks cost alike."""
    loads = _sums(units.costs, bin_of, per_rank * num_ranks)
    groups = np.argsort(-loads, kind="stable").reshape(per_rank, num_ranks)
    numbers = np.empty(per_rank * num_ranks, dtype=np.int64)
    for k, ranks in enumerate(_differencing(loads[groups])):
        numbers[groups[k]] = k * num_ranks + ranks
    return numbers[bin_of]


def _differencing(loads: np.ndarray) -> list[np.ndarray]:
    """Karmarkar and Karp's largest differencing (1982), for groups of one bin a rank: which rank gets each bin of a group.

    loads: int64[groups, ranks], each row descending. Of all partitions, at first the groups, the two whose ranks differ most are
    joined, heavy to light, until one is left, whose ranks cost alike; then the ranks are handed down to the groups.
    """
    num_groups, num_ranks = loads.shape
    partitions = [(int(row[-1] - row[0]), k, row) for k, row in enumerate(loads)]
    heapq.heapify(partitions)
    joins = []
    for serial in range(num_groups, 2 * num_groups - 1):
        (_, first, first_loads), (_, second, second_loads) = heapq.heappop(partitions), heapq.heappop(partitions)
        joined = first_loads + second_loads[::-1]
        order = np.argsort(-joined, kind="stable")
        joins.append((first, second, order))
        heapq.heappush(partitions, (int(joined.min() - joined.max()), serial, joined[order]))
    ranks = [np.arange(num_ranks) for _ in range(2 * num_groups - 1)]
    for serial, (first, second, order) in reversed(list(enumerate(joins, num_groups))):
        ranks[first][order] = ranks[serial]
        ranks[second] = ranks[first][::-1]
    return ranks[:num_groups]


def _even_out(units: _Units, bin_of: np.ndarray, num_ranks: int, target: float) -> int:
    """Relieves the heaviest rank, in place, until it costs no more than `target` or no single exchange helps; what it costs then."""
    sizes = _sums(units.sizes, bin_of, _bins_a_rank(bin_of, num_ranks) * num_ranks)
    loads = _sums(units.costs, bin_of % num_ranks, num_ranks)
    for _ in range(_EXCHANGES * num_ranks):
        heaviest = int(loads.argmax())
        others = (rank for rank in loads.argsort(kind="stable").tolist() if loads[rank] < loads[heaviest])
        if loads[heaviest] <= target or not any(_exchange(units, bin_of, sizes, loads, heaviest, other) for other in others):
            break
    return int(loads.max())


def _exchange(units: _Units, bin_of: np.ndarray, sizes: np.ndarray, loads: np.ndarray, heavy: int, light: int) -> bool:
    """Swaps a unit of one rank for a unit of another, or moves it, so that the two differ least; all in place. Whether one was found.

    sizes: int64[bins].  loads: int64[ranks], the costs.  No bin is emptied.
    """
    num_ranks, gap = len(loads), int(loads[heavy] - loads[light])
    gives, takes = np.flatnonzero(bin_of % num_ranks == heavy), np.flatnonzero(bin_of % num_ranks == light)
    out_of = bin_of[gives][:, None]
    into = np.concatenate([bin_of[takes], np.arange(light, len(sizes), num_ranks)])  # after the units: each bin, for a unit that moves
    no_units = np.zeros(len(into) - len(takes), dtype=np.int64)
    shift = units.costs[gives][:, None] - np.concatenate([units.costs[takes], no_units])
    grows = units.sizes[gives][:, None] - np.concatenate([units.sizes[takes], no_units])
    allowed = (shift > 0) & (shift < gap) & (sizes[into] + grows <= units.capacity) & (sizes[out_of] - grows <= units.capacity)
    allowed &= sizes[out_of] > grows
    if not allowed.any():
        return False
    i, j = np.unravel_index(np.where(allowed, abs(gap - 2 * shift), gap).argmin(), shift.shape)
    source, target = bin_of[gives[i]], into[j]
    bin_of[gives[i]] = target
    bin_of[takes[j : j + 1]] = source
    sizes[[source, target]] += grows[i, j] * np.array([-1, 1])
    loads[[heavy, light]] += shift[i, j] * np.array([-1, 1])
    return True


def _dearest_first(units: _Units, bin_of: np.ndarray, num_ranks: int) -> np.ndarray:
    """The same plan with each rank's bins in the order of their cost."""
    loads = _sums(units.costs, bin_of, _bins_a_rank(bin_of, num_ranks) * num_ranks).reshape(-1, num_ranks)
    place = np.argsort(np.argsort(-loads, axis=0, kind="stable"), axis=0, kind="stable")
    return place.flatten()[bin_of] * num_ranks + bin_of % num_ranks

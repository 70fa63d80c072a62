"""Ledger: every byte that crossed between device and host, by iteration, role, part and direction, beside the minimum."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from rlhf_mc.offload.minimum import Direction, Minimum, RoleBytes, Route, Visit
from rlhf_mc.offload.parts import Part
from rlhf_mc.offload.text import aligned, readable

if TYPE_CHECKING:
    from rlhf_mc.models.role import Role
    from rlhf_mc.offload.lanes import Copied


class Moved(NamedTuple):
    """One copy. Its seconds are known once it is done."""

    route: Route
    num_bytes: int
    copied: Copied


class Ledger:
    """The start, then iterations: `metrics` closes one. Beside each number of bytes stands the least that would have done."""

    def __init__(self) -> None:
        self.start_bytes = 0
        self._sizes: dict[Role, RoleBytes] = {}
        self._follower = Minimum(self._sizes)
        self._moved: list[Moved] = []
        self._minimum: Counter[Route] = Counter()
        self._all_moved: Counter[Route] = Counter()
        self._all_minimum: Counter[Route] = Counter()
        self._all_seconds: dict[Route, float] = defaultdict(float)

    def add_role(self, role: Role, sizes: RoleBytes) -> None:
        """A role whose state has just been sent to the host for the first time; no iteration pays for that.

        sizes: bytes of what this rank copies.
        """
        self._sizes[role] = sizes
        self.start_bytes += sum(moved.num_bytes for moved in self._moved if moved.route.role == role)
        self._moved = [moved for moved in self._moved if moved.route.role != role]

    def record(self, role: Role, part: Part, direction: Direction, num_bytes: int, copied: Copied) -> None:
        """A copy that was queued in the present iteration."""
        self._moved.append(Moved(Route(role, part, direction), num_bytes, copied))

    def visited(self, visit: Visit) -> None:
        """A stage asked for parts of a role, of several, or for an empty device."""
        self._minimum.update(self._follower.follow(visit))

    def moved(self) -> dict[Route, int]:
        """Bytes of the present iteration by route."""
        totals: Counter[Route] = Counter()
        for moved in self._moved:
            totals[moved.route] += moved.num_bytes
        return dict(totals)

    def minimum(self) -> dict[Route, int]:
        """Least bytes of the present iteration by route, from what its stages asked for and changed until now."""
        return dict(self._minimum)

    def metrics(self) -> dict[str, float]:
        """offload/... of the present iteration, which it closes: GiB, and seconds of copying (the two directions may overlap)."""
        moved = self.moved()
        seconds: dict[Route, float] = defaultdict(float)
        for entry in self._moved:
            seconds[entry.route] += entry.copied.finish()
        metrics = {"offload/minimum_gib": _gib(self._minimum.values())}
        for direction in ("to_host", "to_device"):
            metrics[f"offload/{direction}_gib"] = _gib(n for route, n in moved.items() if route.direction == direction)
            metrics[f"offload/{direction}_seconds"] = sum(s for route, s in seconds.items() if route.direction == direction)
        for route, num_bytes in moved.items():
            metrics[f"offload/{route.role.value}/{route.part.label}_{route.direction}_gib"] = _gib([num_bytes])
            self._all_seconds[route] += seconds[route]
        self._all_moved.update(moved)
        self._all_minimum.update(self._minimum)
        self._moved, self._minimum = [], Counter()
        return metrics

    def table(self) -> str:
        """All iterations: bytes, minimum, and rate of each route; the last line sums up. Closes the present iteration."""
        self.metrics()
        rows = [("role", "part", "direction", "bytes", "minimum", "moved/minimum", "GB/s")]
        routes = self._all_moved.keys() | self._all_minimum.keys()
        for route in sorted(routes, key=lambda r: (r.role.value, r.direction, r.part.value)):
            figures = _figures(self._all_moved[route], self._all_minimum[route], self._all_seconds[route])
            rows.append((route.role.value, route.part.label, route.direction, *figures))
        totals = self._all_moved.total(), self._all_minimum.total(), sum(self._all_seconds.values())
        rows.append(("all", "", "", *_figures(*totals)))
        start = f"before the first iteration, the starting states went to the host once: {readable(self.start_bytes)}"
        return f"{aligned(rows)}\n{start}"


def _gib(numbers: Iterable[int]) -> float:
    return sum(numbers) / 2**30


def _figures(num_bytes: int, minimum: int, seconds: float) -> tuple[str, str, str, str]:
    ratio = f"{num_bytes / minimum:.3f}" if minimum else "1.000" if num_bytes == 0 else "inf"
    rate = f"{num_bytes / seconds / 1e9:.2f}" if seconds else "-"
    return readable(num_bytes), readable(minimum), ratio, rate

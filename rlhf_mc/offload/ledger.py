"""Ledger: every byte that crossed between device and host, by iteration, role, part and direction, beside the minimum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlhf_mc.offload.minimum import Direction, Route, Visit, minimum_bytes
from rlhf_mc.offload.parts import Part

if TYPE_CHECKING:
    from rlhf_mc.models.role import Role
    from rlhf_mc.offload.lanes import Copied


class Moved(NamedTuple):
    """One copy. Its seconds are known once it is done."""

    route: Route
    num_bytes: int
    copied: Copied


class Ledger:
    """Periods: the start, then one for each iteration; `metrics` closes an iteration."""

    def __init__(self) -> None:
        self.sizes: dict[Role, dict[Part, int]] = {}
        self.start_bytes = 0
        self._moved: list[Moved] = []
        self._visits: list[Visit] = []
        self._bytes: dict[Route, int] = defaultdict(int)
        self._seconds: dict[Route, float] = defaultdict(float)
        self._closed_visits = 0

    def record(self, role: Role, part: Part, direction: Direction, num_bytes: int, copied: Copied) -> None:
        """A copy that was queued in the present iteration."""
        self._moved.append(Moved(Route(role, part, direction), num_bytes, copied))

    def visited(self, visit: Visit) -> None:
        """A stage asked for parts of a role, or for an empty device."""
        self._visits.append(visit)

    def end_of_start(self) -> None:
        """What was recorded until now was the first copy of the starting weights to the host; no iteration pays for it."""
        self.start_bytes += sum(moved.num_bytes for moved in self._moved)
        self._moved = []

    def moved(self) -> dict[Route, int]:
        """Bytes of the present iteration by route."""
        totals: dict[Route, int] = defaultdict(int)
        for moved in self._moved:
            totals[moved.route] += moved.num_bytes
        return dict(totals)

    def minimum(self) -> dict[Route, int]:
        """Least bytes of the present iteration by route, from what its stages asked for and changed."""
        before = minimum_bytes(self.sizes, self._visits[: self._closed_visits])
        until_now = minimum_bytes(self.sizes, self._visits)
        return {route: n - before.get(route, 0) for route, n in until_now.items() if n > before.get(route, 0)}

    def metrics(self) -> dict[str, float]:
        """offload/... of the present iteration, which it closes. GiB, seconds of copying (both directions may overlap), and moved / minimum."""
        moved, minimum = self.moved(), self.minimum()
        seconds: dict[Route, float] = defaultdict(float)
        for entry in self._moved:
            seconds[entry.route] += entry.copied.finish()
        metrics = {"offload/minimum_gib": _gib(minimum.values())}
        for direction in ("to_host", "to_device"):
            metrics[f"offload/{direction}_gib"] = _gib(n for route, n in moved.items() if route.direction == direction)
            metrics[f"offload/{direction}_seconds"] = sum(s for route, s in seconds.items() if route.direction == direction)
        for route, num_bytes in moved.items():
            metrics[f"offload/{route.role.value}/{route.part.label}_{route.direction}_gib"] = _gib([num_bytes])
            self._bytes[route] += num_bytes
            self._seconds[route] += seconds[route]
        self._moved = []
        self._closed_visits = len(self._visits)
        return metrics

    def table(self) -> str:
        """All iterations: bytes, minimum, and rate of each route; the last line sums up."""
        self.metrics()
        minimum = minimum_bytes(self.sizes, self._visits)
        rows = [("role", "part", "direction", "GiB", "minimum", "moved/minimum", "GB/s")]
        for route in sorted(self._bytes.keys() | minimum.keys(), key=lambda r: (r.role.value, r.direction, r.part.value)):
            rows.append((route.role.value, route.part.label, route.direction, *_figures(self._bytes[route], minimum.get(route, 0), self._seconds[route])))
        rows.append(("all", "", "", *_figures(sum(self._bytes.values()), sum(minimum.values()), sum(self._seconds.values()))))
        return aligned(rows) + f"\nbefore the first iteration, the starting states went to the host once: {_gib([self.start_bytes]):.3f} GiB"


def _gib(numbers: Iterable[int]) -> float:
    return sum(numbers) / 2**30


def _figures(num_bytes: int, minimum: int, seconds: float) -> tuple[str, str, str, str]:
    ratio = f"{num_bytes / minimum:.3f}" if minimum else "1.000" if num_bytes == 0 else "inf"
    rate = f"{num_bytes / seconds / 1e9:.2f}" if seconds else "-"
    return f"{num_bytes / 2**30:.3f}", f"{minimum / 2**30:.3f}", ratio, rate


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


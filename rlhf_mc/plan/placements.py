"""How many nodes the three ways to place four models need: side by side, forward-offload, and full time-sharing.

They are compared by memory alone: for each, the fewest whole nodes on which some layout fits, with the choices of search.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlhf_mc.offload.text import aligned
from rlhf_mc.plan.case import Case
from rlhf_mc.plan.plan import Plan
from rlhf_mc.plan.search import Found, layout_text, search

_MOST_NODES = 64


@dataclass(frozen=True)
class Need:
    """The fewest nodes for some roles, and the layout there; None where even _MOST_NODES do not hold them."""

    what: str
    nodes: int | None
    found: Found | None

    @property
    def seconds(self) -> float | None:
        """Of an iteration there."""
        return None if self.found is None else Plan.of(self.found.case).times.iteration


def fewest_nodes(case: Case, what: str) -> Need:
    """Adds node after node until a layout fits."""
    for nodes in range(1, _MOST_NODES + 1):
        larger = replace(case, machine=case.machine.with_gpus(nodes * case.machine.gpus_per_node))
        ranked = search(larger)
        if ranked and ranked[0].fits:
            return Need(what, nodes, ranked[0])
    return Need(what, None, None)


def side_by_side(case: Case) -> Iterator[Need]:
    """Each model on devices of its own, where it stays; the engine is on the actor's, beside it."""
    for role in case.shapes:
        yield fewest_nodes(replace(case, only=(role,), placement="resident"), f"side by side: {role.value}")


def placements(case: Case) -> list[Need]:
    """The parts of side by side, then the other two."""
    return [
        *side_by_side(case),
        fewest_nodes(replace(case, placement="forward_offload"), "forward-offload"),
        fewest_nodes(replace(case, placement="time_sharing"), "time-sharing"),
    ]


def placements_table(case: Case, needs: list[Need]) -> str:
    """One row for each, with the sum for side by side."""
    apart = [need.nodes for need in needs if need.what.startswith("side by side")]
    total = None if None in apart else sum(apart)
    rows = [("placement", "nodes", "GPUs", "seconds an iteration", "layout")]
    rows.append(("side by side", *_size(case, total), "", "the sum of its parts:"))
    for need in needs:
        part = need.what.startswith("side by side")
        seconds = "" if part or need.seconds is None else f"{need.seconds:.0f}"
        label = f"  {need.what.partition(': ')[2]}" if part else need.what
        rows.append((label, *_size(case, need.nodes), seconds, layout_text(need.found) if need.found else "nothing fits"))
    return aligned(rows)


def _size(case: Case, nodes: int | None) -> tuple[str, str]:
    return (f"over {_MOST_NODES}", "") if nodes is None else (str(nodes), str(nodes * case.machine.gpus_per_node))

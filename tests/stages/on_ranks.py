"""What the tests of stages/ run on ranks (see tests/ranks.py)."""

from __future__ import annotations

from rlhf_mc.parallel.world import World
from rlhf_mc.stages.metrics import straggler_metrics


def stragglers(world: World) -> dict[str, float]:
    """Of ranks that take 1, 2, ... seconds to score, and as long as each other to train."""
    return straggler_metrics(world, {"timing_s/score": 1.0 + world.rank, "timing_s/train": 3.0, "perf/throughput": 1.0})

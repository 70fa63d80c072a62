"""python -m rlhf_mc.rehearsal --config FILE --ranks N [--rank R ...] [section.key=value ...]: a job of N ranks, in this process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rlhf_mc.config import ConfigError, Settings
from rlhf_mc.launch import quiet_libraries
from rlhf_mc.offload.text import aligned
from rlhf_mc.recipe import load_settings

_SIZES = (8, 64, 256, 1024)
_REPEATS = 3  # the least counts: Python's garbage collector falls now into one part, now into another


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlhf_mc.rehearsal", description="Plans a job as its ranks would, without them.")
    parser.add_argument("--config", required=True, metavar="FILE", help="recipe, YAML")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="ranks of the job")
    which = "one to build in full; again for more (default: first, middle, last)"
    parser.add_argument("--rank", type=int, action="append", metavar="R", help=which)
    parser.add_argument("--ranks-per-node", type=int, default=8, metavar="N", help="which ranks share a host (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of the recipe")
    return parser


def _sizes(settings: Settings, size: int) -> list[int]:
    """At which the growth is measured: about 8, 64, 256 and 1,024 ranks, up to `size`, each as large as the layout allows."""
    from rlhf_mc.rehearsal.rehearse import smallest_size

    engines = settings.rollout.engine_ranks
    step = smallest_size(settings) - engines
    wanted = [min(size, max(step + engines, (number - engines) // step * step + engines)) for number in _SIZES]
    return sorted({*wanted, size})


def _growth(settings: Settings, sizes: Sequence[int], ranks_per_node: int) -> str:
    """Processor seconds of each part by the size of the job, on the last rank that trains."""
    from rlhf_mc.rehearsal.rehearse import rehearse_rank

    def measured(size: int) -> dict[str, float]:
        last = settings.num_trainer_ranks("train", size) - 1
        watches = [rehearse_rank(settings, size, last, ranks_per_node).watch for _ in range(_REPEATS)]
        return {name: min(watch.seconds[name] for watch in watches) for name in watches[0].seconds}

    found = [measured(size) for size in sizes]
    rows = [("part, seconds on one rank", *(f"{size:,} ranks" for size in sizes), "growth")]
    rows += [(name, *_figures([seconds[name] for seconds in found])) for name in found[0]]
    return aligned([*rows, ("all", *_figures([sum(seconds.values()) for seconds in found]))])


def _figures(seconds: Sequence[float]) -> list[str]:
    return [*(f"{s:.3f}" for s in seconds), f"x {seconds[-1] / max(seconds[0], 1e-6):.1f}"]


def _rehearse(arguments: argparse.Namespace) -> int:
    settings, _ = load_settings(["--config", arguments.config, *arguments.overrides], "train")
    size, per_node = arguments.ranks, arguments.ranks_per_node
    settings.check("train", size)
    # Imported here, after the settings were checked: megatron-core takes many seconds.
    from rlhf_mc.rehearsal.rehearse import check_rehearsable, faults, peers_of, rehearse_rank, smallest_size

    check_rehearsable(settings, size)
    rehearse_rank(settings, size, 0, per_node)  # what libraries load when first used is not the control plane's
    smallest = smallest_size(settings)
    if smallest > _SIZES[0]:
        print(f"the smallest job of this layout has {smallest} ranks")
    print(_growth(settings, _sizes(settings, size), per_node))
    ranks = arguments.rank or sorted({0, size // 2, size - 1})
    rehearsed = [rehearse_rank(settings, size, rank, per_node) for rank in ranks]
    peers = [peers_of(settings, size, one) for one in rehearsed]
    for one, others in zip(rehearsed, peers):
        print(f"rank {one.view.rank} of {size:,}: {one.watch.total:.2f} s; compared with {len(others)} peers that planned by themselves")
    found = list(faults(settings, size, rehearsed, peers))
    for fault in found:
        print(f"fault: {fault}", file=sys.stderr)
    if not found:
        print(
            "no fault: every slice of a weight sync that one rank sends, its peer receives, and each engine's shard comes whole; process "
            "groups are those of the grid; micro-batches are as many on all ranks, and every sequence is in one; every sample is dealt "
            "once; roles have the bytes that were planned, and an iteration moves the least"
        )
    return 1 if found else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 where ranks disagree, 2 for a wrong setting."""
    quiet_libraries()
    try:
        return _rehearse(_parser().parse_intermixed_args(argv))
    except ConfigError as error:
        print(f"rlhf_mc.rehearsal: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

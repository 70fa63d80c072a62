"""The console script, for what is done before a run and after it.

    rlhf-mc plan --config FILE --gpus N --host-memory-gib H [...] [section.key=value ...]
    rlhf-mc picture OUTPUT_DIR [--ranks 0 1 ...] [--to DIR] [--png]

Programs that run on ranks are started by torchrun (launch.py); what is here runs in one process, without devices; a plan without torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_mc.config import ConfigError
from rlhf_mc.plan.case import Case, Workload
from rlhf_mc.plan.machine import DEVICES, Machine
from rlhf_mc.plan.picture import picture
from rlhf_mc.plan.placements import placements, placements_table
from rlhf_mc.plan.plan import Plan
from rlhf_mc.plan.search import nearest_miss, search, search_table
from rlhf_mc.recipe import load_settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlhf-mc", description="Tools beside the programs that torchrun starts.")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="what fits where, and how long it takes", epilog="How to read it: docs/planning.md")
    plan.add_argument("--config", required=True, metavar="FILE", help="recipe, YAML")
    plan.add_argument("--gpus", type=int, required=True, metavar="N", help="devices in all")
    plan.add_argument("--device", choices=[*DEVICES], default="h100", help="their kind (default: %(default)s)")
    plan.add_argument("--gpu-memory-gib", type=float, metavar="G", help="memory of one (default: as the kind has)")
    plan.add_argument("--host-memory-gib", type=float, required=True, metavar="H", help="host memory of a node")
    plan.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default: %(default)s")
    plan.add_argument("--link-gbs", type=float, metavar="B", help="between devices of a node, GB/s in one direction")
    plan.add_argument("--network-gbs", type=float, metavar="B", help="between nodes, GB/s a device in one direction")
    plan.add_argument("--prompt-tokens", type=float, metavar="T", help="of a prompt on average (default: the longest)")
    plan.add_argument("--response-tokens", type=float, metavar="T", help="of a response on average (default: the longest)")
    plan.add_argument("--search", type=int, metavar="K", help="the K best layouts instead of the recipe's own")
    plan.add_argument("--placements", action="store_true", help="nodes that side by side, forward-offload and time-sharing need")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of the recipe")
    picture_of = commands.add_parser("picture", help="what a run learned, and where its time and memory went", epilog="More: docs/trace.md")
    picture_of.add_argument("run", metavar="OUTPUT_DIR", help="trainer.output_dir of a run")
    picture_of.add_argument("--ranks", type=int, nargs="+", default=[], metavar="R", help="of the timeline (default: the first four)")
    picture_of.add_argument("--to", metavar="DIR", help="where the pictures go (default: OUTPUT_DIR)")
    picture_of.add_argument("--png", action="store_true", help="PNG instead of SVG")
    return parser


def _picture(arguments: argparse.Namespace) -> int:
    """0; a picture for which a run has no data is no error."""
    from rlhf_mc.pictures import draw  # matplotlib takes longer to start than a plan to make

    run = Path(arguments.run)
    for sentence in draw(run, arguments.ranks, Path(arguments.to or run), "png" if arguments.png else "svg"):
        print(sentence)
    return 0


def _case(arguments: argparse.Namespace) -> Case:
    settings, _ = load_settings(["--config", arguments.config, *arguments.overrides], "train")
    machine = Machine.of(
        arguments.device,
        arguments.gpus,
        arguments.host_memory_gib,
        arguments.gpu_memory_gib,
        arguments.gpus_per_node,
        arguments.link_gbs,
        arguments.network_gbs,
    )
    if not (arguments.search or arguments.placements):
        settings.check("train", machine.num_gpus)
    return Case.of(settings, machine, Workload.of(settings, arguments.prompt_tokens, arguments.response_tokens))


def _plan(arguments: argparse.Namespace) -> int:
    """0, or 1 where nothing fits."""
    case = _case(arguments)
    if arguments.placements:
        print(placements_table(case, placements(case)))
        return 0
    if arguments.search:
        found = search(case)
        fits = bool(found) and found[0].fits
        if arguments.json:
            rows = [{"fits": one.fits, "overrides": one.overrides(), **Plan.of(one.case).as_json()} for one in found[: arguments.search]]
            print(json.dumps(rows))
        else:
            print(search_table(case, found, arguments.search) if fits else nearest_miss(case, found))
        return 0 if fits else 1
    plan = Plan.of(case)
    print(json.dumps(plan.as_json()) if arguments.json else picture(plan))
    for shortage in plan.shortages():
        print(f"does not fit: {shortage}", file=sys.stderr)
    return 1 if plan.shortages() else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 where what was planned does not fit, 2 for a wrong setting."""
    arguments = _parser().parse_args(argv)
    try:
        return {"plan": _plan, "picture": _picture}[arguments.command](arguments)
    except ConfigError as error:
        print(f"rlhf-mc {arguments.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

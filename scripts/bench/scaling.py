"""One training step on CPU ranks at several layouts, and what sums in rank order (trainer.deterministic) add to it.

    bash scripts/bench/run.sh scaling [--dtype fp32] [--repeats 7] [--layouts DP1 DP2 DP4 TP2]

The same batch and model at every layout, and all cores of the host shared out over its ranks; so what a layout takes over DP1 is the
overhead of the program itself: collectives, micro-batches of other sizes, pipeline stages that wait. Where there are more ranks than
cores, ranks also wait for cores. Both kinds of sum are measured in turn in the same processes; a step is forward and backward of all
micro-batches, the sum of gradients, and the optimizer's step with its shards gathered.
Its last line is one JSON object: DP1 over the slowest data-parallel layout that has a core for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from offload import save_model, settings_for
from packing import lengths_of, packed_batch

from rlhf_mc.config import MicroBatch, Optim, Parallel
from rlhf_mc.launch import quiet_libraries, use_share_of_cores

LAYOUTS = {
    "DP1": dict(),
    "DP2": dict(data=2),
    "DP4": dict(data=4),
    "TP2": dict(tensor=2),
    "PP2": dict(pipeline=2),
    "CP2": dict(context=2),
    "TP2xDP2": dict(tensor=2, data=2),
}
SEQUENCES, LONGEST = 32, 256


def num_ranks(layout: dict[str, int]) -> int:
    """All sizes multiplied."""
    product = 1
    for size in layout.values():
        product *= size
    return product


def measure(layout: dict[str, int], model: str, dtype: str, repeats: int) -> dict[str, list[float]]:
    """Collective over all ranks. Seconds of each step on the slowest rank, with the backend's sums and with those in rank order."""
    from rlhf_mc.models.loss import Loss, LossSum
    from rlhf_mc.models.passes import accumulate_gradients, update, zero_gradients
    from rlhf_mc.models.role import Role, build_role
    from rlhf_mc.parallel.reductions import reduce_in_rank_order
    from rlhf_mc.parallel.world import join_world, leave_world

    parallel = Parallel(**{name: size for name, size in layout.items() if name != "data"})
    settings = replace(settings_for(dtype, LONGEST), parallel=parallel)
    world = join_world(settings)
    actor = build_role(Role.ACTOR, "language", model, settings, world, Optim(lr=1e-6))
    batch = packed_batch(lengths_of(0.5, SEQUENCES, LONGEST), actor.shape.vocab)
    total = int(batch.loss_mask.sum())

    def loss(answers, _) -> LossSum:
        return LossSum(-answers.logprobs.sum() / total, {"loss": -answers.logprobs.sum() / total})

    def step(in_rank_order: bool) -> float:
        reduce_in_rank_order(in_rank_order)
        world.show_itself_to_megatron()
        world.from_everyone(None)
        start = time.perf_counter()
        zero_gradients(actor)
        accumulate_gradients(actor, batch, "predicted", MicroBatch(tokens=4 * LONGEST), Loss(("loss",), loss))
        update(actor, 1e-6)
        return max(world.from_everyone(time.perf_counter() - start))

    times = {"backend": [], "rank order": []}
    for repeat in range(repeats + 1):
        for kind in times:
            spent = step(kind == "rank order")
            if repeat:
                times[kind].append(spent)
    leave_world()
    return times


def run_layout(name: str, arguments: argparse.Namespace, model: str) -> dict[str, float]:
    """Median seconds of a step, by kind of sum, from ranks that torchrun starts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks(LAYOUTS[name])}", __file__]
    command += ["--rank-of", name, "--model", model, "--dtype", arguments.dtype, "--repeats", str(arguments.repeats)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return {kind: statistics.median(times) for kind, times in json.loads(done.stdout.splitlines()[-1]).items()}


def main() -> None:
    """Measures every layout, prints the table, and the JSON line; or is one rank of a layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="fp32", choices=("bf16", "fp32"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rank-of", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    quiet_libraries()
    if arguments.rank_of:
        use_share_of_cores()
        times = measure(LAYOUTS[arguments.rank_of], arguments.model, arguments.dtype, arguments.repeats)
        if os.environ["RANK"] == "0":
            print(json.dumps(times))
        return
    cores = len(os.sched_getaffinity(0))
    print(f"{SEQUENCES} sequences of up to {LONGEST} tokens, {arguments.dtype}, {cores} cores for all ranks; seconds of a step")
    print(f"{'layout':10}{'ranks':>6}{'backend':>10}{'of DP1':>8}{'rank order':>12}{'over backend':>14}")
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(1)
        model = save_model(Path(directory), 23.0)  # six layers, so that two stages share them
        for name in dict.fromkeys(["DP1", *arguments.layouts]):
            results[name] = run_layout(name, arguments, model)
            backend, in_order = results[name]["backend"], results[name]["rank order"]
            share = results["DP1"]["backend"] / backend
            print(f"{name:10}{num_ranks(LAYOUTS[name]):6}{backend:10.3f}{share:8.2f}{in_order:12.3f}{in_order / backend:14.2f}", flush=True)
    fitting = [n for n in results if set(LAYOUTS[n]) <= {"data"} and num_ranks(LAYOUTS[n]) <= cores]
    slowest, alone = max(results[name]["backend"] for name in fitting), results["DP1"]["backend"]
    print(json.dumps(dict(name="scaling", measured=slowest, limit=alone, ratio=alone / slowest, unit="s")))


if __name__ == "__main__":
    main()

"""One saved rollout, trained at many layouts: losses and gradient norms of each, as a table for docs/replay.md.

    python scripts/replay_layouts.py [--ranks 4] [--iterations 3] [key=value ...]

Makes the experience of some iterations on one rank with an untrained tiny model (trainer.mode=rollout, the real engine), then
trains on these files (trainer.mode=update) by the whole program under torchrun at each layout of up to `--ranks` ranks. In the first iteration
the weights are the same everywhere, in later ones they are what the updates before made of them. Shown are the numbers of the last iteration,
and the largest difference to one rank, relative, over these numbers: of the first iteration, and of all. Ends with status 1 where one is
larger than --tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "scripts/configs/ppo_tiny.yaml"
NUMBERS = ("critic/vf_loss", "critic/grad_norm", "actor/pg_loss", "actor/grad_norm")
TP2, PP2, CP2 = "parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2"
INTERLEAVED = [PP2, "parallel.virtual_pipeline=2"]
PACKED_SMALL = ["actor.micro_batch.tokens=64", "critic.micro_batch.tokens=64"]
ONE_BY_ONE = [f"{role}.micro_batch={{tokens: null, sequences: 1}}" for role in ("actor", "critic")]
LAYOUTS: Mapping[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "one rank, again": (1, []),
    "micro-batches of 64 tokens": (1, PACKED_SMALL),
    "one sequence at a time": (1, ONE_BY_ONE),
    "recompute selective": (1, ["trainer.recompute=selective"]),
    "recompute full": (1, ["trainer.recompute=full"]),
    "DP2": (2, []),
    "DP2, plain optimizer": (2, ["parallel.distributed_optimizer=false"]),
    "DP2, sums in rank order": (2, ["trainer.deterministic=true"]),
    "TP2 + SP": (2, [TP2]),
    "TP2 + SP, sums in rank order": (2, [TP2, "trainer.deterministic=true"]),
    "TP2 + SP, recompute full": (2, [TP2, "trainer.recompute=full"]),
    "PP2": (2, [PP2]),
    "PP2, interleaved": (2, INTERLEAVED),
    "CP2": (2, [CP2]),
    "DP4": (4, []),
    "TP2 x DP2": (4, [TP2]),
    "TP2 x PP2": (4, [TP2, PP2]),
    "TP2 x PP2, interleaved": (4, [TP2, *INTERLEAVED]),
    "TP2 x CP2": (4, [TP2, CP2]),
    "PP2 x CP2, recompute full": (4, [PP2, CP2, "trainer.recompute=full"]),
    "PP2 x DP2, interleaved, micro-batches of 64": (4, [*INTERLEAVED, *PACKED_SMALL]),
    "CP2 x DP2, sums in rank order": (4, [CP2, "trainer.deterministic=true"]),
}


def launch(task: Path, output: Path, ranks: int, arguments: list[str]) -> list[dict[str, float]]:
    """The metrics of each iteration of one run of the program."""
    model = task / "model"
    paths = [f"actor.path={model}", f"reward_model.path={model}", f"data.train=[{task / 'prompts.jsonl'}]", "data.validation=[]"]
    # The untrained reward model pays nothing; this does, now and then.
    function = '{path: "rlhf_mc.rewards.builtin:regex_match", name: has_one, weight: 2.0, arguments: {pattern: "1"}}'
    fixed = [f"reward.functions=[{function}]", "wandb.mode=disabled", "critic.warmup_iterations=0", "trainer.evaluate_every=0"]
    fixed.append(f"trainer.output_dir={output}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "rlhf_mc.train"]
    command += ["--config", str(RECIPE), *fixed, "medusa.enabled=false", "medusa.path=null", *paths, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}")
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def difference(run: list[dict[str, float]], expected: list[dict[str, float]]) -> float:
    """The largest over iterations and numbers, relative."""
    pairs = [(line[name], right[name]) for line, right in zip(run, expected, strict=True) for name in NUMBERS]
    return max(abs(ours - theirs) / max(abs(theirs), 1e-6) for ours, theirs in pairs)


def main() -> None:
    """Runs everything and prints the table, one row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="of the largest layouts")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=1e-3, help="relative, of numbers in fp32")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    heading = ["layout", "ranks", *NUMBERS, "difference, first", "difference, all"]
    print(f"| {' | '.join(heading)} |\n|" + "---|" * len(heading), flush=True)
    worst = 0.0
    with tempfile.TemporaryDirectory() as directory:
        task, rollout = Path(directory, "task"), Path(directory, "rollout")
        subprocess.run([sys.executable, str(ROOT / "scripts/make_tiny_task.py"), str(task)], check=True, stdout=subprocess.DEVNULL)
        common = [f"trainer.iterations={options.iterations}", *options.overrides]
        launch(task, rollout, 1, [*common, "trainer.mode=rollout", "rollout.dump=true"])
        replay = [*common, "trainer.mode=update", f"rollout.replay_dir={rollout / 'rollouts'}"]
        expected: list[dict[str, float]] = []
        for name, (ranks, layout) in LAYOUTS.items():
            if ranks > options.ranks:
                continue
            run = launch(task, Path(directory, name.replace(" ", "_")), ranks, [*replay, *layout])
            expected = expected or run
            at_first, off = difference(run[:1], expected[:1]), difference(run, expected)
            worst = max(worst, off)
            cells = [f"{run[-1][number]:.7g}" for number in NUMBERS]
            print(f"| {name} | {ranks} | {' | '.join(cells)} | {at_first:.1e} | {off:.1e} |", flush=True)
    sys.exit(f"the largest difference, {worst:.1e}, is over {options.tolerance:.1e}" if worst > options.tolerance else 0)


if __name__ == "__main__":
    main()

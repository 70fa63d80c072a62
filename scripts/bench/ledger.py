"""Bytes that a real PPO run moves between device and host, against the minimum that its settings allow.

    bash scripts/bench/run.sh ledger [key=value ...] [--iterations 3] [--layouts DP1 TP2]

For DP1, DP2, DP2 with shared host copies, and TP2, runs the whole program (megatron-core and vLLM) on an untrained tiny
model, and reads what its ledger logged for each iteration. The minimum is computed here, from config.json and the settings
alone (rlhf_mc/offload/minimum.py has the rules), before anything runs. Its last line is one JSON object; the ratio is exactly 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rlhf_mc.launch import quiet_libraries
from rlhf_mc.recipe import load_settings

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "scripts/configs/ppo_tiny.yaml"
LAYOUTS = {
    "DP1": (1, []),
    "DP2": (2, []),
    "DP2, shared": (2, ["offload.share_host_copies=true"]),
    "TP2": (2, ["parallel.tensor=2", "rollout.tensor_parallel=2"]),
}
SMALL = ["data.prompts_per_iteration=16", "algorithm.mini_batch_sequences=16", "critic.warmup_iterations=1", "wandb.mode=disabled"]


def overrides(task: Path, output: Path, iterations: int) -> list[str]:
    """The recipe's paths, and a size that takes seconds. The critic and the reward model start with the actor's weights."""
    model = task / "model"
    paths = [f"actor.path={model}", f"reward_model.path={model}", f"data.train=[{task / 'prompts.jsonl'}]", "data.validation=[]"]
    return [*SMALL, *paths, f"trainer.output_dir={output}", f"trainer.iterations={iterations}", "trainer.evaluate_every=0"]


def minimum_of_iterations(arguments: list[str], num_ranks: int) -> list[int]:
    """Bytes of rank 0 in each iteration, by the settings."""
    from rlhf_mc.models.roles import role_paths
    from rlhf_mc.offload.minimum import minimum_bytes
    from rlhf_mc.offload.planned import planned_bytes, planned_visits
    from rlhf_mc.offload.sizes import Place
    from rlhf_mc.parallel.grids import TrainingGrid

    settings, _ = load_settings(arguments, "train")
    place = Place.of(TrainingGrid.of(settings.parallel, num_ranks, 0))
    sharing = place.copies if settings.offload.share_host_copies else 1
    sizes = {role: size.shared(sharing) for role, size in planned_bytes(settings, role_paths(settings), place).items()}
    visits, totals = [], [0]
    for iteration in range(settings.trainer.iterations):
        rests = iteration < settings.critic.warmup_iterations
        visits += planned_visits(settings, role_paths(settings), actor_rests=rests)
        totals.append(sum(minimum_bytes(sizes, visits).values()))
    return [after - before for before, after in zip(totals, totals[1:])]


def moved_in_iterations(arguments: list[str], num_ranks: int, output: Path) -> list[int]:
    """Bytes of rank 0 in each iteration, by the ledger of a real run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m", "rlhf_mc.train"]
    subprocess.run([*command, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    moved = [sum(line.get(f"offload/{way}_gib", 0.0) for way in ("to_host", "to_device")) for line in lines]
    return [round(gib * 2**30) for gib, line in zip(moved, lines) if "offload/minimum_gib" in line]


def main() -> None:
    """Runs every layout, prints the table, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    quiet_libraries()
    measured = limit = 0
    print(f"{'layout':14}{'iteration':>10}{'moved, bytes':>16}{'minimum, bytes':>16}{'ratio':>8}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        task = Path(directory) / "task"
        subprocess.run([sys.executable, str(ROOT / "scripts/make_tiny_task.py"), str(task)], check=True, stdout=subprocess.DEVNULL)
        for name in options.layouts:
            num_ranks, layout = LAYOUTS[name]
            output = Path(directory) / name.replace(", ", "_")
            arguments = ["--config", str(RECIPE), *overrides(task, output, options.iterations), *layout, *options.overrides]
            least = minimum_of_iterations(arguments, num_ranks)
            for iteration, (moved, minimum) in enumerate(zip(moved_in_iterations(arguments, num_ranks, output), least, strict=True)):
                print(f"{name:14}{iteration:10}{moved:16}{minimum:16}{moved / minimum:8.3f}", flush=True)
                measured, limit = measured + moved, limit + minimum
    print(json.dumps(dict(name="ledger", measured=measured, limit=limit, ratio=measured / limit, unit="bytes")))


if __name__ == "__main__":
    main()

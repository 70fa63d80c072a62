"""The recipes' tasks and models, for benches that need trained ones: made as scripts/run_ppo_*.sh make them, once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "scripts/configs"
RUNS = ROOT / "runs"  # where scripts/run_ppo_*.sh put everything


def launch(module: str, arguments: Sequence[str], num_ranks: int) -> None:
    """One program of rlhf_mc on so many ranks, each of which takes its share of the cores; silent unless it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m", module, *arguments]
    threads = {**os.environ, "OMP_NUM_THREADS": str(max(1, os.cpu_count() // num_ranks))}
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=threads)


def _script(name: str, target: Path) -> None:
    """Makes `target`, unless it is there."""
    subprocess.run([sys.executable, str(ROOT / "scripts" / name), str(target)], check=True, stdout=subprocess.DEVNULL)


def tiny_task(run: Path) -> None:
    """RUN/task."""
    _script("make_tiny_task.py", run / "task")


def tiny_sft(run: Path, num_ranks: int) -> None:
    """RUN/sft, of RUN/task, unless it is there."""
    if not (run / "sft/model").exists():
        paths = [f"trainer.output_dir={run / 'sft'}", f"supervised.path={run / 'task/model'}", *_rows(run, "sft")]
        launch("rlhf_mc.stages.sft", ["--config", str(CONFIGS / "tiny_sft.yaml"), *paths, "wandb.mode=disabled"], num_ranks)


def tiny_reward_model(run: Path, num_ranks: int) -> None:
    """RUN/reward_model, of RUN/task and RUN/sft, unless it is there."""
    if not (run / "reward_model/model").exists():
        paths = [f"trainer.output_dir={run / 'reward_model'}", f"supervised.path={run / 'sft/model'}", *_rows(run, "preferences")]
        arguments = ["--config", str(CONFIGS / "tiny_reward_model.yaml"), *paths, "wandb.mode=disabled"]
        launch("rlhf_mc.stages.reward_model", arguments, num_ranks)


def _rows(run: Path, name: str) -> list[str]:
    return [f"data.train=[{run / f'task/{name}.jsonl'}]", f"data.validation=[{run / f'task/{name}_validation.jsonl'}]"]


def smollm2(run: Path) -> None:
    """RUN/model and RUN/prompts."""
    _script("make_smollm2.py", run / "model")
    _script("make_smollm2_prompts.py", run / "prompts")

"""scripts/launch.sh and run_ppo_70b.sh: what torchrun is told on one node and on several, and the dry run of the 70B recipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SET_HERE = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RDZV_ID", "LOG_DIR", "MAX_RESTARTS", "SHUTDOWN_SECONDS", "NPROC", "DRY_RUN")


def bash(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _SET_HERE}
    paths = f"{Path(sys.executable).parent}{os.pathsep}{inherited['PATH']}"
    environment = inherited | {"PATH": paths, "RLHF_MC_VENV": sys.prefix} | variables
    return subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize(
    "variables, options",
    [
        ({}, "--standalone"),
        ({"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "node0"}, "--nnodes 4 --node-rank 3 --master-addr node0 --master-port 29500"),
        (
            {"NNODES": "4", "RDZV_ID": "17.0", "MASTER_ADDR": "node0", "MASTER_PORT": "20017"},
            "--nnodes 4 --rdzv-backend c10d --rdzv-id 17.0 --rdzv-endpoint node0:20017",
        ),
    ],
    ids=["one node", "four by number", "four by the name of the job"],
)
def test_how_the_nodes_find_each_other(variables: dict[str, str], options: str) -> None:
    done = bash("source scripts/launch.sh && torchrun_options", **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == options


def test_a_node_without_a_number_is_told_so() -> None:
    done = bash("source scripts/launch.sh && torchrun_options", NNODES="2")
    assert done.returncode != 0 and "NODE_RANK: is the number of this node, from 0" in done.stderr


def test_the_dry_run_of_the_70b_recipe_fits_on_four_nodes_and_not_on_two() -> None:
    fits = bash("bash scripts/run_ppo_70b.sh", DRY_RUN="1")
    assert fits.returncode == 0, fits.stderr
    assert "32 x h100 of 80.0 GiB" in fits.stdout and "<- peak" in fits.stdout
    assert fits.stdout.startswith("command on each node: torchrun --nnodes 4 --node-rank 0")
    short = bash("bash scripts/run_ppo_70b.sh", DRY_RUN="1", NNODES="2")
    assert short.returncode == 1 and "does not fit: device: train" in short.stderr

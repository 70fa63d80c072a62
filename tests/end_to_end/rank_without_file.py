"""PPO whose rank 1 sees other files than rank 0, as on a node without a mount: it runs in the directory named by RANK_1_RUNS_IN."""

from __future__ import annotations

import os

from rlhf_mc.launch import run_program
from rlhf_mc.train import ppo

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        os.chdir(os.environ["RANK_1_RUNS_IN"])
    run_program("train", ppo)

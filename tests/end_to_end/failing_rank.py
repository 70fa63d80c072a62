"""PPO with a bug that only rank 1 meets, in the second iteration, while rank 0 goes on to a collective; started by test_killed_rank.py."""

from __future__ import annotations

import rlhf_mc.stages.train as stage
from rlhf_mc.batch import Experience
from rlhf_mc.launch import run_program
from rlhf_mc.stages.start import Run
from rlhf_mc.train import ppo

real_train_critic = stage.train_critic


def train_critic(run: Run, experience: Experience, iteration: int) -> dict[str, float]:
    if iteration == 1 and run.world.rank == 1:
        raise ZeroDivisionError("the bug of rank 1")
    return real_train_critic(run, experience, iteration)


if __name__ == "__main__":
    stage.train_critic = train_critic
    run_program("train", ppo)

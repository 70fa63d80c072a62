"""PPO with separate engines and a bug in the second iteration on the side that FAILING_SIDE names; started by test_separate.py."""

from __future__ import annotations

import os

import rlhf_mc.stages.train as stage
from rlhf_mc.launch import run_program
from rlhf_mc.pipeline.server import EngineServer
from rlhf_mc.train import ppo

real_train_critic, real_generate = stage.train_critic, EngineServer._generate


def train_critic(run, experience, iteration):
    """Between two commands: the engine waits for the next."""
    if iteration == 1:
        raise ZeroDivisionError("the bug of the trainer")
    return real_train_critic(run, experience, iteration)


def generate(server: EngineServer, command) -> None:
    """The trainer waits for samples."""
    if command.version == 1:
        raise ZeroDivisionError("the bug of the engine")
    real_generate(server, command)


if __name__ == "__main__":
    if os.environ["FAILING_SIDE"] == "trainer":
        stage.train_critic = train_critic
    else:
        EngineServer._generate = generate
    run_program("train", ppo)

"""Advantages of an iteration, with a critic and without one."""

from __future__ import annotations

import torch
from torch import tensor

from rlhf_mc.config import Algorithm, Rollout, Settings
from rlhf_mc.stages.make_experience import estimate_advantages

LENGTHS = tensor([2, 1, 0, 3])
REWARDS = tensor([1.0, 2.0, 7.0, -1.0, 0.5, 4.5])  # in all: 3, 7, nothing, 4
ALL = torch.ones(4, dtype=torch.bool)


def estimated(advantages: str, trains: torch.Tensor = ALL, values: torch.Tensor = torch.zeros(6)) -> tuple[list[float], list[float]]:
    settings = Settings(algorithm=Algorithm(advantages=advantages), rollout=Rollout(samples_per_prompt=2))
    found, returns = estimate_advantages(settings, REWARDS, values, LENGTHS, trains)
    return found.tolist(), returns.tolist()


def test_a_sample_is_paid_by_what_it_has_above_the_others_of_its_prompt():
    advantages, returns = estimated("rloo")
    assert advantages == [-4.0, -4.0, 4.0, 4.0, 4.0, 4.0]
    assert returns == [3.0, 3.0, 7.0, 4.0, 4.0, 4.0]
    spread = 8**0.5  # of 3 and 7, and of 0 and 4
    advantages, _ = estimated("grpo")
    torch.testing.assert_close(tensor(advantages), tensor([-2.0, -2.0, 2.0, 2.0, 2.0, 2.0]) / spread)


def test_a_sample_that_does_not_train_is_no_measure_for_the_others():
    advantages, _ = estimated("rloo", trains=tensor([True, False, True, True]))
    assert advantages == [0.0, 0.0, 0.0, 4.0, 4.0, 4.0]


def test_with_a_critic_its_values_count_and_the_whole_batch_is_whitened():
    advantages, returns = estimated("gae", values=torch.arange(6.0))
    whitened = tensor(advantages)
    assert abs(whitened.mean()) < 1e-6 and abs(whitened.std() - 1) < 1e-6
    assert returns[2] == 7.0, "one token: the return is its reward"
    assert estimated("gae", trains=tensor([True, False, True, True]))[0][2] == 0.0

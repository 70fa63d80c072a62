"""The mismatch between the engine's log-probs and the trainer's."""

import math

import pytest
import torch

from rlhf_mc.algorithms.mismatch import RolloutMismatch, rollout_mismatch


def test_it_measures_inside_the_mask_only():
    engine, trainer = torch.tensor([-1.0, -2.0, -3.0, math.nan]), torch.tensor([-1.5, -1.0, 7.0, 0.0])
    mismatch = rollout_mismatch(engine, trainer, torch.tensor([True, True, False, False]))
    assert mismatch == RolloutMismatch(max_abs=1.0, mean_abs=0.75, kl=-0.25)


def test_equal_is_exactly_zero_and_so_is_nothing():
    x = torch.tensor([-0.1, -0.2])
    zero = RolloutMismatch(0.0, 0.0, 0.0)
    assert rollout_mismatch(x, x.clone(), torch.ones(2, dtype=torch.bool)) == zero
    assert rollout_mismatch(x, x + 1, torch.zeros(2, dtype=torch.bool)) == zero


def test_a_nan_inside_the_mask_shows():
    mismatch = rollout_mismatch(torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -1.0]), torch.ones(2, dtype=torch.bool))
    assert math.isnan(mismatch.max_abs) and math.isnan(mismatch.mean_abs) and math.isnan(mismatch.kl)


def test_the_kl_estimate_has_the_sign_of_its_definition():
    """Tokens drawn from the engine's distribution: the mean of engine - trainer tends to KL(engine || trainer)."""
    engine, trainer = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.3, 0.3, 0.4]).log()
    tokens = torch.multinomial(engine.exp(), 20000, replacement=True, generator=torch.Generator().manual_seed(1))
    mismatch = rollout_mismatch(engine[tokens], trainer[tokens], torch.ones(20000, dtype=torch.bool))
    assert mismatch.kl == pytest.approx(float((engine.exp() * (engine - trainer)).sum()), rel=0.05)

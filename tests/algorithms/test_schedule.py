"""The learning rate at the steps that matter, and its shape between them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mc.algorithms.schedule import lr_at
from rlhf_mc.config import Optim

SCHEDULES = ["constant", "linear", "cosine"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_starts_above_zero_and_ends_at_lr(schedule):
    optim = Optim(lr=1e-3, schedule=schedule, warmup_steps=4)
    assert [lr_at(step, 20, optim) for step in range(5)] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
    assert lr_at(0, 20, Optim(lr=1e-3, schedule=schedule)) == pytest.approx(1e-3)


def test_the_middle_and_the_end():
    for schedule, middle in [("constant", 1.0), ("linear", 0.6), ("cosine", 0.6)]:
        optim = Optim(lr=1.0, min_lr=0.2, schedule=schedule, warmup_steps=10)
        assert lr_at(60, 110, optim) == pytest.approx(middle)
        end = 1.0 if schedule == "constant" else 0.2
        assert lr_at(110, 110, optim) == pytest.approx(end) == lr_at(500, 110, optim)
    quarter = lr_at(25, 100, Optim(lr=1.0, schedule="cosine"))
    assert quarter == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


@given(st.sampled_from(SCHEDULES), st.integers(1, 60), st.integers(0, 80), st.floats(0, 1))
def test_it_rises_then_falls_between_its_bounds(schedule, total, warmup, floor):
    optim = Optim(lr=1.0, min_lr=floor, schedule=schedule, warmup_steps=warmup)
    rates = [lr_at(step, total, optim) for step in range(total)]
    assert all(0 < rate <= 1.0 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert all(rate >= floor for rate in rates[warmup:])


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="step -1 is negative"):
        lr_at(-1, 10, Optim())

"""Drafting over a run: replicas add up, the schedule follows what was measured, and the run ends with first against last."""

from __future__ import annotations

import json

import pytest
from medusa.rollouts import Device, roll_out

from rlhf_mc.medusa.draft_length import DraftStatistics, fixed
from rlhf_mc.medusa.drafting import Drafting

MEMORY_BOUND = Device(memory=1.0, token=0.01, draft=0.001)
LENGTHS = [60] * 8


def rollouts(drafting: Drafting, count: int, acceptance: list[float]) -> list[str]:
    """So many rollouts of two replicas; what the run says of them."""
    said: list[str] = []
    for number in range(count):
        replicas = [roll_out(drafting.schedule, MEMORY_BOUND, acceptance, LENGTHS, seed=2 * number + r)[0].numbers() for r in (0, 1)]
        said += drafting.observe(replicas)
    return said


def test_the_schedule_follows_what_was_measured_and_says_so() -> None:
    drafting = Drafting(2)
    said = rollouts(drafting, 4, [0.8, 0.7])
    assert drafting.schedule.drafted(8, 1000) == 2
    assert any("5 to 8 sequences: 0 -> 2 drafted tokens" in sentence for sentence in said)
    said = rollouts(drafting, 12, [0.0, 0.0])
    assert drafting.schedule.drafted(8, 1000) == 0
    assert any("5 to 8 sequences: 2 -> 0 drafted tokens" in sentence for sentence in said)


def test_a_fixed_number_stays_whatever_is_measured() -> None:
    drafting = Drafting(2, drafted_tokens=1)
    assert rollouts(drafting, 3, [0.0, 0.0]) == []
    assert drafting.schedule == fixed(1)
    assert drafting.metrics()["medusa/acceptance/position_1"] == 0.0


def test_without_heads_nothing_is_drafted_or_told() -> None:
    drafting = Drafting(0)
    assert drafting.observe([DraftStatistics(0).numbers()] * 2) == []
    assert (drafting.schedule, drafting.metrics(), drafting.summary()) == (fixed(0), {}, {})


def test_acceptance_against_the_rollout_before_and_the_first_against_the_last() -> None:
    drafting = Drafting(1, drafted_tokens=1)
    rollouts(drafting, 1, [0.9])
    first = drafting.metrics()["medusa/acceptance/position_1"]
    assert "medusa/acceptance_change" not in drafting.metrics()
    rollouts(drafting, 1, [0.5])
    last = drafting.metrics()["medusa/acceptance/position_1"]
    assert drafting.metrics()["medusa/acceptance_change"] == pytest.approx(last - first) and last < first - 0.2
    assert drafting.summary()["draft_acceptance"] == (first, last)


def test_drafting_goes_on_from_its_state_as_json_has_it() -> None:
    drafting, resumed = Drafting(2), Drafting(2)
    rollouts(drafting, 3, [0.8, 0.7])
    resumed.restore(json.loads(json.dumps(drafting.state())))
    assert resumed.schedule == drafting.schedule and resumed.metrics() == drafting.metrics()
    assert rollouts(resumed, 3, [0.2, 0.1]) == rollouts(drafting, 3, [0.2, 0.1])
    assert resumed.state() == drafting.state() and resumed.summary() == drafting.summary() != {}


def test_replicas_that_had_nothing_to_do_add_nothing() -> None:
    one, two = Drafting(1, drafted_tokens=1), Drafting(1, drafted_tokens=1)
    worked = roll_out(fixed(1), MEMORY_BOUND, [0.6], LENGTHS)[0].numbers()
    one.observe([worked])
    two.observe([worked, DraftStatistics(1).numbers()])
    assert one.metrics() == two.metrics()

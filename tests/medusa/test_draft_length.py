"""Numbers of drafted tokens: what they gain by hand, when they change, what trials cost, and long runs on a device without a clock."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa.rollouts import Device, LongRun, accepted_of, roll_out
from rlhf_mc.medusa.draft_length import (
    NUM_BUCKETS,
    DraftStatistics,
    StepMeasure,
    bucket_of,
    changes,
    choose,
    expected_tokens,
    fixed,
    metrics,
)

#: Reading the weights takes as long as computing 32 tokens; drafting 3 tokens of 8 sequences adds 2 %.
BALANCED = Device(memory=0.032, token=0.001, draft=0.00003)
#: As a CPU: each token takes its time, and drafting is not free.
COMPUTE_BOUND = Device(memory=0.001, token=0.001, draft=0.0003)
LENGTHS = [40 + 40 * number for number in range(24)]
RANDOM_HEADS, GOOD_HEADS = (0.001, 0.001, 0.001), (0.8, 0.7, 0.6)


def measured(times: dict[tuple[int, int], float], acceptance: list[float], sequences: int = 1000, steps: int = 10) -> DraftStatistics:
    """times: (running, k) -> seconds of a step.  acceptance: a_i, as `sequences` sequences showed it."""
    statistics = DraftStatistics(len(acceptance))
    for (running, k), seconds in times.items():
        for _ in range(steps):
            statistics.add(StepMeasure(running, running * (1 + k), seconds, k, k))
    reached = [sequences]
    for share in acceptance:
        reached.append(round(reached[-1] * share))
    statistics.add(StepMeasure(sequences, 0, 0.0, len(acceptance), 0, sequences, tuple(reached[1:])))
    return statistics


@pytest.mark.parametrize("drafted, tokens", [(0, 1.0), (1, 1.5), (2, 1.75), (3, 1.75 + 0.25 * 0.8)])
def test_expected_tokens_by_hand(drafted, tokens):
    assert expected_tokens([0.5, 0.5, 0.8], drafted) == pytest.approx(tokens)


def test_expected_tokens_are_the_mean_of_what_is_accepted():
    chance, acceptance = random.Random(1), [0.7, 0.4, 0.9]
    mean = sum(1 + accepted_of(3, acceptance, chance) for _ in range(20000)) / 20000
    assert mean == pytest.approx(expected_tokens(acceptance, 3), abs=0.02)


@pytest.mark.parametrize("running, bucket", [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (10**6, NUM_BUCKETS - 1)])
def test_buckets_are_powers_of_two(running, bucket):
    assert bucket_of(running) == bucket


@pytest.mark.parametrize(
    "present, gain, chosen",
    [(0, 1.02, 0), (0, 1.04, 1), (1, 1.01, 1), (1, 0.99, 0)],
    ids=["too little to begin", "enough to begin", "enough to go on", "a loss"],
)
def test_drafting_begins_with_a_margin_and_ends_where_it_loses(present, gain, chosen):
    history = measured({(1, 0): 0.010, (1, 1): 0.010 * 1.5 / gain}, [0.5])
    assert choose(history, fixed(present)).plans[0].drafted == chosen


def test_the_fastest_number_is_taken():
    """E = 1, 1.8, 2.44 and 2.696 over times 1, 1.2, 1.4 and 1.8: 1, 1.5, 1.74 and 1.5 times as fast."""
    times = {(1, 0): 0.010, (1, 1): 0.012, (1, 2): 0.014, (1, 3): 0.018}
    history = measured(times, [0.8, 0.8, 0.4])
    assert history.speeds(0) == pytest.approx([1.0, 1.5, 2.44 / 1.4, 2.696 / 1.8])
    assert choose(history).plans[0].drafted == 2


def test_what_is_not_measured_is_tried_first_and_then_does_as_the_next_larger():
    history = measured({(8, 0): 0.010, (8, 1): 0.011, (2, 0): 0.009}, [0.6])
    plans = choose(history).plans
    assert [plan.drafted for plan in plans] == [1, 1, 1, 1] + [0] * (NUM_BUCKETS - 4)
    assert [plan.untried for plan in plans[:5]] == [(0, 1), (1,), (0, 1), (), (0, 1)]
    assert [plans[0].at(step) for step in range(10)] == [0] * 4 + [1] * 4 + [1] * 2
    assert [plans[4].at(step) for step in range(10)] == [0] * 4 + [1] * 4 + [0] * 2


def test_a_new_run_decodes_plainly_but_for_its_trials():
    assert [choose(DraftStatistics(2)).drafted(16, step) for step in range(14)] == [0] * 4 + [1] * 4 + [2] * 4 + [0] * 2
    assert {fixed(2).drafted(running, step) for running in (1, 64, 5000) for step in range(300)} == {2}


def test_steps_after_a_change_and_steps_with_prompts_have_no_times():
    statistics = DraftStatistics(2)
    statistics.add(StepMeasure(4, 4, 1.0, checked=0, proposed=2))
    statistics.add(StepMeasure(4, 12, 2.0, checked=2, proposed=2, drafting=4, accepted=(3, 1)))
    statistics.add(StepMeasure(4, 12, 4.0, checked=2, proposed=0, drafting=4, accepted=(2, 1)))
    statistics.add(StepMeasure(4, 103, 8.0))
    statistics.add(StepMeasure(4, 10, 8.0, checked=2, proposed=2, drafting=3, accepted=(3, 0)))
    assert [statistics.seconds(2, k) for k in range(3)] == [None, None, 2.0]
    assert statistics.acceptance == [8 / 11, 2 / 8]
    assert statistics.steps_at(3) == 3


def test_positions_that_were_not_drafted_are_not_rejected():
    statistics = DraftStatistics(2)
    statistics.add(StepMeasure(10, 30, 1.0, checked=2, proposed=1, drafting=10, accepted=(8, 4)))
    statistics.add(StepMeasure(10, 20, 1.0, checked=1, proposed=1, drafting=10, accepted=(8,)))
    assert statistics.acceptance == [0.8, 0.5]


def test_replicas_that_add_up_their_numbers_choose_alike():
    schedule = choose(DraftStatistics(3))
    parts = [roll_out(schedule, BALANCED, GOOD_HEADS, LENGTHS[start::2], seed=start)[0] for start in range(2)]
    summed = DraftStatistics.from_numbers(3, [a + b for a, b in zip(*(part.numbers() for part in parts))])
    assert DraftStatistics.from_numbers(3, summed.numbers()).numbers() == summed.numbers()
    assert summed.acceptance[0] == pytest.approx(0.8, abs=0.05)
    assert summed.steps_at(10) == sum(part.steps_at(10) for part in parts)
    alike = [choose(DraftStatistics(3).then(summed), schedule) for _ in parts]
    assert alike[0] == alike[1] and any(plan.drafted for plan in alike[0].plans)


def test_the_past_fades_where_something_new_is_known_only():
    past = measured({(1, 0): 0.010, (1, 1): 0.020}, [0.5], steps=100)
    new = measured({(1, 0): 0.030}, [0.0], sequences=256, steps=8)
    after = past.then(new)
    assert after.seconds(0, 0) == pytest.approx(0.020) and after.seconds(0, 1) == pytest.approx(0.020)
    assert after.acceptance == pytest.approx([0.25])
    for _ in range(1000):
        after = after.then(DraftStatistics(1))
    assert not after.unmeasured(0) and after.acceptance == pytest.approx([0.25])


def test_a_number_tried_with_more_sequences_is_not_blamed_for_them():
    """Seconds grow with the tokens, so that a draft accepted half the time gains 1.5 / 2, whichever B it was tried with."""
    times = {(64, 1): 0.128, (40, 0): 0.040, (20, 0): 0.020, (20, 1): 0.040}
    assert measured(times, [0.5]).speeds(bucket_of(64)) == pytest.approx([1.0, 0.75], rel=0.02)
    flat = {(64, 1): 0.010, (40, 0): 0.010, (20, 0): 0.010, (20, 1): 0.010}
    assert measured(flat, [0.5]).speeds(bucket_of(64)) == pytest.approx([1.0, 1.5], rel=0.02)
    alone = {(64, 1): 0.010, (64, 0): 0.010}
    assert measured(alone, [0.5]).speeds(bucket_of(64)) == pytest.approx([1.0, 1.5], rel=0.02)


speeds = st.lists(st.floats(0.1, 3.0), min_size=1, max_size=4)


@given(speeds, st.integers(0, 20))
def test_trials_cost_two_percent_at_most(slower_or_faster, rollout):
    times = {(1, k): 0.01 / speed for k, speed in enumerate([1.0, *slower_or_faster])}
    previous = choose(DraftStatistics(len(slower_or_faster)))
    for _ in range(rollout):
        previous = choose(DraftStatistics(len(slower_or_faster)), previous)
    history = measured(times, [0.0] * len(slower_or_faster))
    plan = choose(history, previous).plans[0]
    steps = [plan.at(step) for step in range(20 * plan.period)]
    rates = history.speeds(0)
    share = steps.count(plan.tried) / len(steps)
    assert share <= 0.02 and share * (rates[plan.drafted] / rates[plan.tried] - 1) <= 0.02
    assert set(steps) == {plan.drafted, plan.tried} and plan.drafted != plan.tried


def test_rollouts_shorter_than_the_period_try_everything_in_their_turn():
    history, schedule, tried = measured({(1, k): 0.01 * (1 + k) for k in range(4)}, [0.0] * 3), None, []
    for _ in range(400):
        schedule = choose(history, schedule)
        tried += [k for step in range(20) if (k := schedule.drafted(1, step))]
    assert len(tried) / (400 * 20) == pytest.approx(0.015, abs=0.005)
    assert all(tried.count(k) > 10 for k in (1, 2, 3))


@pytest.mark.parametrize("device", [BALANCED, COMPUTE_BOUND], ids=["balanced", "compute bound"])
@pytest.mark.parametrize("lengths", [LENGTHS, range(20, 84, 2)], ids=["long", "short"])
def test_heads_that_guess_nothing_are_switched_off_and_cost_three_percent_at_most(device, lengths):
    run = LongRun(3, device, lengths)
    run.go_on(4, RANDOM_HEADS)
    assert set(run.drafted().values()) == {0}
    assert run.go_on(20, RANDOM_HEADS) <= 1.03
    assert set(run.drafted().values()) == {0}


@pytest.mark.parametrize("device", [BALANCED, COMPUTE_BOUND], ids=["balanced", "compute bound"])
def test_noise_does_not_make_heads_cost_more(device):
    """Drafts that nearly nothing costs may then be on here and off there, for nearly no loss."""
    run = LongRun(3, replace(device, noise=0.1), LENGTHS)
    run.go_on(4, RANDOM_HEADS)
    assert run.go_on(15, RANDOM_HEADS) <= 1.03
    assert run.drafted()[16] == run.drafted()[32] == 0


def test_good_heads_draft_where_the_device_has_arithmetic_to_spare():
    run = LongRun(3, BALANCED, LENGTHS)
    run.go_on(3, GOOD_HEADS)
    drafted = run.drafted()
    assert [drafted[running] for running in (1, 2, 4, 8)] == [3, 3, 3, 3] and drafted[32] < 3
    assert run.go_on(3, GOOD_HEADS) < 0.65


def test_good_heads_do_not_draft_where_each_token_takes_its_time():
    run = LongRun(3, COMPUTE_BOUND, LENGTHS)
    run.go_on(3, GOOD_HEADS)
    assert all(k == 0 for running, k in run.drafted().items() if running > 1)
    assert run.go_on(5, GOOD_HEADS) <= 1.03


def test_a_run_follows_heads_that_learn_and_heads_that_fall_behind():
    run = LongRun(3, BALANCED, LENGTHS)
    run.go_on(5, RANDOM_HEADS)
    assert set(run.drafted().values()) == {0}
    run.go_on(20, GOOD_HEADS)
    assert run.drafted()[4] == 3 and run.go_on(3, GOOD_HEADS) < 0.65
    run.go_on(2, RANDOM_HEADS)
    assert run.drafted()[8] == run.drafted()[16] == 0 and run.go_on(10, RANDOM_HEADS) <= 1.03


def test_drafting_ends_where_plain_steps_have_become_faster():
    """The heads stay good, but on another device each token takes its time. Trials without drafts show that, first where there are
    many steps.
    """
    run = LongRun(3, BALANCED, range(300, 2700, 200))
    run.go_on(2, GOOD_HEADS)
    assert run.drafted()[8] == 3
    run.device = COMPUTE_BOUND
    assert run.go_on(1, GOOD_HEADS) > 1.6
    run.go_on(14, GOOD_HEADS)
    assert run.drafted()[8] == run.drafted()[16] == 0 and run.go_on(1, GOOD_HEADS) < 1.2


def test_changes_say_what_and_why():
    times = {(12, 0): 0.021, (12, 3): 0.035, (12, 1): 0.030, (12, 2): 0.032}
    times |= {(1, k): 0.010 for k in range(4)} | {(2, k): 0.010 for k in range(4)}
    history = measured(times, [0.12, 0.25, 0.0])
    sentences = changes(fixed(3), choose(history, fixed(3)), history)
    assert sentences == ["speculation: 9 to 16 sequences: 3 -> 0 drafted tokens (acceptance 0.12, 0.25, 0.00; step 35 -> 21 ms)"]
    assert [sentence.split(": ")[1] for sentence in changes(fixed(0), choose(history), history)] == ["1 sequence", "2 sequences"]


def test_metrics_by_hand():
    """Three plain steps of 4 sequences, 10 ms each, and two that check 2 drafts of each in 15 ms: 10 and 5 of 8 accepted, then 4."""
    rollout = DraftStatistics(3)
    for proposed in (0, 0, 2):
        rollout.add(StepMeasure(4, 4, 0.010, 0, proposed))
    rollout.add(StepMeasure(4, 12, 0.015, 2, 2, drafting=4, accepted=(3, 1)))
    rollout.add(StepMeasure(4, 12, 0.015, 2, 2, drafting=4, accepted=(3, 2)))
    found = metrics(rollout, DraftStatistics(3).then(rollout))
    plain = 2 * 0.010 + 2 * 0.010 * (1 + 6 / 8 + 3 / 8)
    assert found == pytest.approx({
        "medusa/acceptance/position_1": 6 / 8,
        "medusa/acceptance/position_2": 3 / 6,
        "medusa/accepted_length": 1 + 9 / 8,
        "medusa/tokens_per_forward": 1 + 9 / 20,
        "medusa/drafted_tokens": 16,
        "medusa/wasted_tokens": 7,
        "medusa/steps_drafting": 2 / 5,
        "medusa/speedup_estimate": plain / (2 * 0.010 + 2 * 0.015),
    })  # fmt: skip


def test_metrics_leave_out_what_was_not_seen():
    plain, drafting = DraftStatistics(1), DraftStatistics(1)
    plain.add(StepMeasure(1, 1, 0.010))
    drafting.add(StepMeasure(1, 2, 0.010, 1, 1, drafting=1, accepted=(1,)))
    assert metrics(plain, plain) == {
        "medusa/speedup_estimate": 1.0,
        "medusa/tokens_per_forward": 1.0,
        "medusa/drafted_tokens": 0,
        "medusa/wasted_tokens": 0,
        "medusa/steps_drafting": 0.0,
    }
    assert "medusa/speedup_estimate" not in metrics(drafting, drafting)
    assert metrics(drafting, plain.then(drafting))["medusa/speedup_estimate"] == pytest.approx(2.0)


def test_the_estimate_is_what_the_simulated_clock_says():
    schedule = fixed(2)
    rollout, spent = roll_out(schedule, BALANCED, GOOD_HEADS, LENGTHS)
    plain, plain_spent = roll_out(fixed(0), BALANCED, GOOD_HEADS, LENGTHS)
    assert metrics(rollout, plain.then(rollout))["medusa/speedup_estimate"] == pytest.approx(plain_spent / spent, rel=0.1)

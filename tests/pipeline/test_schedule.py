"""Schedules: the invariants of `pipelined`, what it costs by the same arithmetic, and that no schedule beats the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlhf_mc.pipeline.executor import execute
from rlhf_mc.pipeline.schedule import Costs, Operation, Resources, bound, choose_chunks, groups_of, pipelined, seconds, serial

ROLES = ["reference", "reward_model", "actor", "critic"]
some_seconds = st.floats(0, 100)
resources = st.builds(Resources, apart=st.booleans(), beside=st.booleans(), roles_at_once=st.integers(1, 4))
costs = st.builds(
    Costs,
    generate=some_seconds,
    score=st.tuples(*[some_seconds] * 4).map(lambda spent: dict(zip(ROLES, spent))),
    overhead=st.floats(0, 1),
    load=st.tuples(*[some_seconds] * 4).map(lambda spent: dict(zip(ROLES, spent))),
    reward=some_seconds,
)


@st.composite
def groups(draw):
    """Chunks 0 .. n - 1 in consecutive groups."""
    count = draw(st.integers(1, 8))
    cuts = sorted(draw(st.sets(st.integers(1, count), max_size=4)) | {0, count})
    return [tuple(range(a, b)) for a, b in zip(cuts, cuts[1:])]


@given(groups(), resources)
def test_every_chunk_is_generated_once_in_order_and_submitted_right_after(cut, what):
    operations = pipelined(ROLES, cut, what)
    chunks = [chunk for group in cut for chunk in group]
    assert [op.chunks for op in operations if op.kind == "generate"] == [(chunk,) for chunk in chunks]
    for place, operation in enumerate(operations):
        if operation.kind == "generate":
            assert operations[place + 1] == Operation("submit", operation.chunks)
    assert sum(op.kind == "submit" for op in operations) == len(chunks)


@given(groups(), resources)
def test_every_role_scores_every_group_once_after_it_was_generated(cut, what):
    operations = pipelined(ROLES, cut, what)
    scored = [(op.role, op.chunks) for op in operations if op.kind == "score"]
    assert sorted(scored) == sorted((role, tuple(group)) for role in ROLES for group in cut)
    for place, operation in enumerate(operations):
        if operation.kind == "score":
            made = {chunk for op in operations[:place] if op.kind == "generate" for chunk in op.chunks}
            assert set(operation.chunks) <= made


@given(groups(), resources)
def test_scoring_waits_for_the_engine_to_sleep_where_it_has_no_room_beside_it(cut, what):
    operations = pipelined(ROLES, cut, what)
    kinds = [op.kind for op in operations]
    assert kinds.count("sleep") == 1 and "generate" not in kinds[kinds.index("sleep") :]
    if not what.can_score_between:
        assert "score" not in kinds[: kinds.index("sleep")]
    elif len(cut) > 1:
        assert "score" in kinds[: kinds.index("sleep")]


@given(groups(), resources)
def test_rewards_are_awaited_last_and_the_critic_scores_last(cut, what):
    operations = pipelined(ROLES, cut, what)
    assert [op.kind for op in operations].count("collect") == 1 and operations[-1].kind == "collect"
    assert [op.role for op in operations if op.kind == "score"][-1] == "critic"


@given(st.integers(2, 8))
def test_the_role_that_is_there_begins_where_one_fits_at_a_time(count):
    operations = pipelined(ROLES, groups_of(count, Resources(apart=True)), Resources(apart=True))
    roles = [op.role for op in operations if op.kind == "score"]
    loads = 1 + sum(a != b for a, b in zip(roles, roles[1:]))
    assert loads == 3 * count + 1
    orders = [roles[start : start + 4] for start in range(0, len(roles), 4)]
    assert orders[-1] == ROLES and all(order in (ROLES, ROLES[::-1]) for order in orders)


@given(groups())
def test_serial_does_one_thing_after_the_other_with_the_same_passes(cut):
    operations = serial(ROLES, cut)
    assert [op.kind for op in operations[:4]] == ["generate", "sleep", "submit", "collect"]
    passes = {(op.role, op.chunks) for op in operations[4:]}
    assert passes == {(op.role, op.chunks) for op in pipelined(ROLES, cut, Resources(apart=True)) if op.kind == "score"}


@given(st.integers(1, 16), costs | costs.map(lambda spent: replace(spent, load={})), resources)
def test_no_schedule_beats_the_bound_and_none_is_slower_than_serial_but_for_its_loads(count, spent, what):
    cut, sizes = groups_of(count, what), [3] * count
    time = seconds(pipelined(ROLES, cut, what), sizes, spent, what)
    assert time >= bound(spent, what, count) * (1 - 1e-9)
    if not any(spent.load.values()):
        assert time <= seconds(serial(ROLES, cut), sizes, spent, what) * (1 + 1e-9)


def test_an_engine_apart_hides_the_smaller_of_two_equal_halves():
    spent, what = Costs(generate=8.0, score={"actor": 8.0}), Resources(apart=True, roles_at_once=1)
    assert seconds(pipelined(["actor"], groups_of(8, what), what), [1] * 8, spent, what) == pytest.approx(9.0)
    assert bound(spent, what, 8) == pytest.approx(9.0)


def test_a_shared_device_hides_rewards_but_no_scoring():
    spent, what = Costs(generate=8.0, score={"actor": 4.0}, reward=12.0), Resources()
    assert seconds(pipelined(["actor"], groups_of(4, what), what), [1] * 4, spent, what) == pytest.approx(14.0)
    assert seconds(serial(["actor"], groups_of(4, what)), [1] * 4, spent, what) == pytest.approx(24.0)


@given(costs, resources, st.integers(1, 40))
def test_the_chosen_number_is_the_smallest_that_is_fast_enough(spent, what, units):
    assume(spent.generate > 0)
    chosen = choose_chunks(spent, what, units)

    def time(count: int) -> float:
        sizes = [(number + 1) * units // count - number * units // count for number in range(count)]
        return seconds(pipelined(ROLES, groups_of(count, what), what), sizes, spent, what)

    counts = [count for count in (1, 2, 4, 8, 16) if count <= units]
    best = min(map(time, counts))
    assert time(chosen) * 0.98 <= best
    assert all(time(count) * 0.98 > best for count in counts if count < chosen)


def test_nothing_to_hide_takes_one_chunk():
    assert choose_chunks(Costs(generate=5.0, score={"actor": 3.0}), Resources(), 64) == 1
    assert choose_chunks(Costs(generate=5.0, score={"actor": 3.0}, reward=5.0), Resources(), 64) > 1
    assert choose_chunks(Costs(generate=5.0, score={"actor": 5.0}, overhead=5.0), Resources(apart=True), 64) == 1


@given(groups(), resources)
def test_the_executor_does_what_the_schedule_says_in_its_order(cut, what):
    done = []

    class Recorder:
        def generate(self, chunks):
            done.append(Operation("generate", tuple(chunks)))

        def submit(self, chunks):
            done.append(Operation("submit", tuple(chunks)))

        def sleep(self):
            done.append(Operation("sleep"))

        def score(self, role, chunks):
            done.append(Operation("score", tuple(chunks), role))

        def collect(self):
            done.append(Operation("collect"))

    operations = pipelined(ROLES, cut, what)
    execute(operations, Recorder())
    assert done == operations

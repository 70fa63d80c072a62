"""The minimum of bytes: by the formula, by hand, and by what must hold for any visits."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mc.offload.minimum import EMPTY, RoleBytes, Route, Visit, heads_visits, minimum_bytes, ppo_visits
from rlhf_mc.offload.parts import TRAINING, Part

N, D = 1000, 4
PARTS = {Part.PARAMS: 2 * N, Part.GRADS: 4 * N, Part.MAIN_PARAMS: 4 * N // D, Part.OPTIMIZER: 8 * N // D}
TRAINED = RoleBytes(PARTS, derived=2 * N)
FROZEN = RoleBytes({Part.PARAMS: 2 * N, Part.GRADS: 0, Part.MAIN_PARAMS: 0, Part.OPTIMIZER: 0})
M = 100
HEADS = RoleBytes({Part.PARAMS: 2 * M, Part.GRADS: 4 * M, Part.MAIN_PARAMS: 4 * M // D, Part.OPTIMIZER: 8 * M // D}, derived=2 * M)
FROZEN_HEADS = RoleBytes({Part.PARAMS: 2 * M, Part.GRADS: 0, Part.MAIN_PARAMS: 0, Part.OPTIMIZER: 0})
NO_HEADS = RoleBytes(dict.fromkeys(PARTS, 0))
SIZES = {"actor": TRAINED, "critic": TRAINED, "reference": FROZEN, "reward_model": FROZEN}
SIZES_WITH_HEADS = SIZES | {"medusa": HEADS}
ITERATION = ppo_visits("actor", "critic", ["reference", "reward_model"])


def later_iteration(sizes: dict[str, RoleBytes], iteration: list[Visit] = ITERATION) -> dict[str, int]:
    """Bytes by direction of the second iteration of two."""
    one, two = (minimum_bytes(sizes, iteration * n) for n in (1, 2))
    return {way: sum(n - one.get(r, 0) for r, n in two.items() if r.direction == way) for way in ("to_device", "to_host")}


def moved_by_role(visits: list[Visit], direction: str) -> dict[str, int]:
    """Bytes of all visits in one direction."""
    totals = Counter()
    for route, num_bytes in minimum_bytes(SIZES_WITH_HEADS, visits).items():
        if route.direction == direction:
            totals[route.role] += num_bytes
    return totals


def test_an_iteration_of_ppo_loads_four_models_and_two_optimizers():
    assert later_iteration(SIZES) == {"to_device": 4 * 2 * N + 2 * 12 * N // D, "to_host": 2 * 12 * N // D + 2 * 2 * N}


def test_without_a_critic_the_actor_stays_from_its_scoring_to_its_training():
    moved = later_iteration(SIZES, ppo_visits("actor", None, ["reference", "reward_model"]))
    assert moved == {"to_device": 3 * 2 * N + 12 * N // D, "to_host": 12 * N // D + 2 * N}


def test_shared_host_copies_divide_what_params_cost():
    shared = {role: size.shared(D) for role, size in SIZES.items()}
    assert later_iteration(shared) == {"to_device": 8 * N // D + 2 * 12 * N // D, "to_host": 2 * 12 * N // D + 2 * 2 * N // D}


@pytest.mark.parametrize(
    ("heads", "train", "loaded", "stored"),
    [(HEADS, True, 12 * M // D, 12 * M // D + 2 * M), (FROZEN_HEADS, False, 2 * M, 0), (NO_HEADS, True, 0, 0)],
    ids=["trained", "frozen", "on another stage"],
)
def test_draft_heads_move_once_an_iteration_beside_the_actor(heads, train, loaded, stored):
    visits = ppo_visits("actor", "critic", ["reference", "reward_model"], heads="medusa", heads_train=train)
    moved = later_iteration(SIZES | {"medusa": heads}, visits)
    without = later_iteration(SIZES)
    assert moved == {"to_device": without["to_device"] + loaded, "to_host": without["to_host"] + stored}


def test_heads_alone_never_move_the_actors_optimizer():
    moved = later_iteration({"actor": FROZEN, "medusa": HEADS}, heads_visits("actor", "medusa"))
    # The actor leaves for the engine once, and stays from the score on; the heads stay from their update to the next sync.
    assert moved == {"to_device": 2 * N + 12 * M // D, "to_host": 12 * M // D + 2 * M}


def test_roles_of_one_visit_come_change_and_leave_each_for_itself():
    alone = Visit("actor", Part.PARAMS)
    sync = Visit("actor", Part.PARAMS, beside=Visit("medusa", Part.PARAMS))
    assert moved_by_role([sync], "to_device") == {"actor": 2 * N, "medusa": 2 * M}
    assert moved_by_role([sync, alone, sync], "to_device") == {"actor": 2 * N, "medusa": 4 * M}
    # Main params give back the params of their own role only.
    reads_actor = Visit("actor", Part.PARAMS, beside=Visit("medusa", TRAINING, updates=True))
    assert moved_by_role([reads_actor], "to_device") == {"actor": 2 * N, "medusa": 12 * M // D}
    assert moved_by_role([reads_actor, EMPTY], "to_host") == {"medusa": 12 * M // D + 2 * M}
    reads_heads = Visit("actor", TRAINING, updates=True, beside=Visit("medusa", Part.PARAMS))
    assert moved_by_role([reads_heads], "to_device") == {"actor": 12 * N // D, "medusa": 2 * M}
    assert moved_by_role([reads_heads, EMPTY], "to_host") == {"actor": 12 * N // D + 2 * N}


def test_a_resting_actor_is_never_stored():
    visits = ppo_visits("actor", "critic", ["reference"], actor_rests=True) * 3
    assert not any(route.direction == "to_host" and route.role == "actor" for route in minimum_bytes(SIZES, visits))


def test_what_is_still_there_is_free():
    params, training = Visit("actor", Part.PARAMS), Visit("actor", TRAINING, updates=True)
    load = Route("actor", Part.PARAMS, "to_device")
    assert minimum_bytes(SIZES, [params, params, params]) == {load: 2 * N}
    assert minimum_bytes(SIZES, [params, EMPTY, params]) == {load: 4 * N}
    assert load not in minimum_bytes(SIZES, [training])
    assert minimum_bytes(SIZES, [training, params])[Route("actor", Part.OPTIMIZER, "to_host")] == 8 * N // D


BESIDE = st.one_of(
    st.none(),
    st.builds(Visit, st.just("medusa"), st.just(Part.PARAMS)),
    st.builds(Visit, st.just("medusa"), st.just(TRAINING), st.booleans()),
)
VISITS = st.lists(
    st.one_of(
        st.just(EMPTY),
        st.builds(Visit, st.sampled_from(sorted(SIZES)), st.just(Part.PARAMS), st.just(False), BESIDE),
        st.builds(Visit, st.sampled_from(["actor", "critic"]), st.just(TRAINING), st.booleans(), BESIDE),
    )
)


@given(VISITS)
def test_nothing_is_stored_more_often_than_changed_nor_frozen_roles_or_gradients_ever(visits):
    moved = minimum_bytes(SIZES_WITH_HEADS, visits)
    assert all(n > 0 and route.part is not Part.GRADS for route, n in moved.items())
    for role, size in SIZES_WITH_HEADS.items():
        updates = sum(claim.updates for visit in visits for claim in visit.claims() if claim.role == role)
        stored = sum(n for route, n in moved.items() if route.role == role and route.direction == "to_host")
        assert stored <= updates * sum(n for part, n in size.parts.items() if part is not Part.GRADS)


@given(VISITS, st.integers(0, 20))
def test_a_pause_of_the_device_never_makes_less_to_move(visits, place):
    paused = visits[:place] + [EMPTY] + visits[place:]
    moved, moved_with_pause = (sum(minimum_bytes(SIZES_WITH_HEADS, v + [EMPTY]).values()) for v in (visits, paused))
    assert moved <= moved_with_pause

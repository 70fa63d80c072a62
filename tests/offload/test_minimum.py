"""The minimum of bytes: by the formula, by hand, and by what must hold for any visits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlhf_mc.offload.minimum import EMPTY, RoleBytes, Route, Visit, minimum_bytes, ppo_visits
from rlhf_mc.offload.parts import TRAINING, Part

N, D = 1000, 4
PARTS = {Part.PARAMS: 2 * N, Part.GRADS: 4 * N, Part.MAIN_PARAMS: 4 * N // D, Part.OPTIMIZER: 8 * N // D}
TRAINED = RoleBytes(PARTS, derived=2 * N)
FROZEN = RoleBytes({Part.PARAMS: 2 * N, Part.GRADS: 0, Part.MAIN_PARAMS: 0, Part.OPTIMIZER: 0})
SIZES = {"actor": TRAINED, "critic": TRAINED, "reference": FROZEN, "reward_model": FROZEN}
ITERATION = ppo_visits("actor", "critic", ["reference", "reward_model"])


def later_iteration(sizes: dict[str, RoleBytes]) -> dict[str, int]:
    """Bytes by direction of the second iteration of two."""
    one, two = (minimum_bytes(sizes, ITERATION * n) for n in (1, 2))
    return {way: sum(n - one.get(r, 0) for r, n in two.items() if r.direction == way) for way in ("to_device", "to_host")}


def test_an_iteration_of_ppo_loads_four_models_and_two_optimizers():
    assert later_iteration(SIZES) == {"to_device": 4 * 2 * N + 2 * 12 * N // D, "to_host": 2 * 12 * N // D + 2 * 2 * N}


def test_shared_host_copies_divide_what_params_cost():
    shared = {role: size.shared(D) for role, size in SIZES.items()}
    assert later_iteration(shared) == {"to_device": 8 * N // D + 2 * 12 * N // D, "to_host": 2 * 12 * N // D + 2 * 2 * N // D}


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


VISITS = st.lists(
    st.one_of(
        st.just(EMPTY),
        st.builds(Visit, st.sampled_from(sorted(SIZES)), st.just(Part.PARAMS)),
        st.builds(Visit, st.sampled_from(["actor", "critic"]), st.just(TRAINING), st.booleans()),
    )
)


@given(VISITS)
def test_nothing_is_stored_more_often_than_changed_nor_frozen_roles_or_gradients_ever(visits):
    moved = minimum_bytes(SIZES, visits)
    assert all(n > 0 and route.part is not Part.GRADS for route, n in moved.items())
    for role in SIZES:
        updates = sum(visit.updates for visit in visits if visit.role == role)
        stored = sum(n for route, n in moved.items() if route.role == role and route.direction == "to_host")
        assert stored <= updates * (2 * N + 12 * N // D)


@given(VISITS, st.integers(0, 20))
def test_a_pause_of_the_device_never_makes_less_to_move(visits, place):
    paused = visits[:place] + [EMPTY] + visits[place:]
    assert sum(minimum_bytes(SIZES, visits + [EMPTY]).values()) <= sum(minimum_bytes(SIZES, paused + [EMPTY]).values())

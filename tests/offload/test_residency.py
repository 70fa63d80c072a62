"""Where memory is: nothing left behind, nothing torn loose, nothing moved twice, and clear words for what cannot be."""

from __future__ import annotations

from collections import Counter

import pytest
from ranks import Layout

COMBINATIONS = [(dtype, distributed) for dtype in ("fp32", "bf16") for distributed in (False, True)]


@pytest.fixture
def models(language_model, value_model) -> dict[str, str]:
    return dict(language=language_model("llama"), value=value_model("llama"))


@pytest.mark.parametrize(("dtype", "distributed"), COMBINATIONS)
def test_every_tensor_of_a_role_is_in_exactly_one_part(ranks, models, dtype, distributed):
    assert ranks.run("offload.on_ranks:parts_of_tensors", dtype=dtype, distributed=distributed, **models) == [[]]


@pytest.mark.parametrize(("dtype", "distributed"), COMBINATIONS)
def test_no_byte_is_left_on_the_device_after_all_off(ranks, models, dtype, distributed):
    (left,) = ranks.run("offload.on_ranks:left_after_all_off", dtype=dtype, distributed=distributed, **models)
    assert left["in parts"] == 0
    assert left["elsewhere"] < 1 << 10  # scalars of megatron's optimizers


def test_host_memory_keeps_its_addresses_and_its_size_over_50_cycles(ranks, models):
    (counts,) = ranks.run("offload.on_ranks:addresses_over_cycles", cycles=50, **models)
    assert counts.pop("grown") <= 1 << 20
    assert len(counts) == 6 and set(counts.values()) == {1}


REQUEST_CASES = [
    pytest.param(Layout(), "fp32", False, id="fp32"),
    pytest.param(Layout(), "bf16", False, id="bf16"),
    pytest.param(Layout(data=2), "bf16", False, id="DP2-bf16"),
    pytest.param(Layout(data=2), "bf16", True, id="DP2-bf16-shared"),
]


@pytest.mark.parametrize(("layout", "dtype", "share"), REQUEST_CASES)
def test_random_requests_follow_a_simple_model(ranks, models, layout, dtype, share):
    for served in ranks.run("offload.machine:random_requests", layout, dtype=dtype, examples=30, share=share, **models):
        assert served > 100


def test_a_swap_takes_no_more_than_the_larger_visit_and_a_bucket(ranks, models):
    (seen,) = ranks.run("offload.on_ranks:swaps_by_schedule", room_for=None, **models)
    assert seen["visit"] <= seen["peak"] <= seen["visit"] + seen["bucket"]
    assert seen["early"] == [] and seen["moved"] == seen["minimum"]


def test_the_trace_has_every_byte_that_the_ledger_has(ranks, models):
    (seen,) = ranks.run("offload.on_ranks:swaps_by_schedule", room_for=None, **models)
    traced = Counter()
    for name, track, seconds, args in seen["spans"]:
        if name.startswith("copy"):
            assert name == f"copy {args['role']} {args['part']}" and seconds > 0
            traced[args["role"], args["part"], {"copies/out": "to_host", "copies/in": "to_device"}[track]] += args["bytes"]
    assert traced == {(role.value, part.label, direction): n for (role, part, direction), n in seen["moved"].items() if n}
    waits = [(track, args.keys()) for name, track, _, args in seen["spans"] if name == "wait/copies"]
    assert waits and all(track == "main" and args == {"role", "part"} for track, args in waits)


@pytest.mark.parametrize("room_for", [None, 1, 2])
def test_the_trace_counts_what_is_on_the_device(ranks, models, room_for):
    (seen,) = ranks.run("offload.on_ranks:swaps_by_schedule", room_for=room_for, **models)
    assert all(counted == there > 0 for counted, there in seen["counted"]) and len(set(seen["counted"])) > 2


@pytest.mark.parametrize("exports", [False, True], ids=["", "exports"])
@pytest.mark.parametrize("room_for", [1, 2])
def test_the_next_visit_is_prefetched_where_the_budget_has_room(ranks, models, room_for, exports):
    (seen,) = ranks.run("offload.on_ranks:swaps_by_schedule", room_for=room_for, exports=exports, **models)
    assert seen["peak"] <= room_for * seen["visit"]
    assert seen["moved"] == seen["minimum"]
    # The actor's moments, while the critic trains, need the room of both; params in scoring always fit.
    assert ("actor optimizer" in seen["early"]) == (room_for == 2)
    assert room_for == 1 or {"medusa main_params", "medusa optimizer"} <= set(seen["early"])
    assert "critic params" in seen["early"]


REFUSALS = {
    "frozen": ("ResidencyError", "reference is frozen and has params only; ask for Part.PARAMS"),
    "no such role": ("ResidencyError", "on_device(reward_model, params): no such role here"),
    "no params": ("ResidencyError", "no use without params; add Part.PARAMS"),
    "no main params": ("ResidencyError", "a step needs the main params too; add Part.MAIN_PARAMS"),
    "budget": ("ResidencyError", "on the device, but the budget is 500 KiB"),
    "frozen beside": ("ResidencyError", "medusa is frozen and has params only; ask for Part.PARAMS"),
    "twice": ("ResidencyError", "a role is asked for twice; name it once"),
    "budget of both": ("ResidencyError", "(actor, params beside medusa, params): needs 613 KiB on the device, but the budget is 500 KiB"),
    "score while off": ("RuntimeError", "actor: not on the device: params"),
    "save while off": ("RuntimeError", "with residency.on_device(Role.ACTOR, ...)"),
    "update without main params": ("RuntimeError", "actor: not on the device: optimizer"),
    "accumulate without gradients": ("RuntimeError", "actor: not on the device: gradients"),
    "nested": ("ResidencyError", "actor is in use; leave its `with` block first"),
    "off inside": ("ResidencyError", "actor is in use; leave its `with` block first"),
    "accumulating": ("ResidencyError", "actor grads: gradients were accumulated and not used yet; call update()"),
    "freed by others": ("ResidencyError", "something else than Residency freed or allocated it"),
}


def test_what_cannot_be_served_is_refused_with_the_fix_and_the_table(ranks, models):
    (messages,) = ranks.run("offload.on_ranks:refusals", **models)
    assert messages.pop("zeroed") == "served"
    assert messages.keys() == REFUSALS.keys()
    for name, (kind, words) in REFUSALS.items():
        assert messages[name].startswith(kind) and words in messages[name], messages[name]
        if kind == "ResidencyError":
            assert "role       part         bytes" in messages[name], messages[name]


def test_memory_replaced_behind_its_back_stops_the_run(ranks, models):
    (message,) = ranks.run("offload.on_ranks:replaced_memory", language=models["language"])
    assert "actor: weight 0 of" in message and "copy into it instead" in message


def test_a_numpy_view_of_a_weight_is_named(ranks, models):
    (message,) = ranks.run("offload.on_ranks:numpy_view", language=models["language"])
    assert "a NumPy view of it was taken" in message and "copy the tensor" in message

"""What the search finds fits, is in order, and can be asked for; where nothing fits it says why, and what would."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.cases import CONFIGS, SHAPES, llama_case

from rlhf_mc.config import ConfigError
from rlhf_mc.plan.machine import GIB
from rlhf_mc.plan.placements import fewest_nodes, placements, placements_table
from rlhf_mc.plan.plan import Plan
from rlhf_mc.plan.search import device_bytes_that_fit, nearest_miss, search, search_table
from rlhf_mc.recipe import load_settings


@given(
    size=st.sampled_from(["8b", "70b"]),
    num_gpus=st.sampled_from([4, 8, 24, 32, 64]),
    gpu_gib=st.sampled_from([24.0, 40.0, 79.0, 139.0]),
    host_gib=st.sampled_from([100.0, 500.0, 2000.0]),
    overrides=st.sampled_from(
        [
            (),
            ("parallel.distributed_optimizer=false",),
            ("offload.enabled=false", "offload.share_host_copies=false"),
            ("pipeline.score_while_generating=true", "parallel.virtual_pipeline=2"),
            ("rollout.placement=separate", "rollout.engine_ranks=2", "medusa.enabled=true"),
        ]
    ),
)
@settings(max_examples=20)
def test_what_fits_has_no_shortage_and_the_rest_has_one(size: str, num_gpus: int, gpu_gib: float, host_gib: float, overrides) -> None:
    case = llama_case(size, num_gpus, *overrides, host_gib=host_gib, gpu_memory_gib=gpu_gib)
    found = search(case)
    plans = [Plan.of(one.case) for one in found]
    assert [not plan.shortages() for plan in plans] == [one.fits for one in found]
    assert sorted(found, key=lambda one: not one.fits) == found, "those that fit come first"
    speeds = [plan.times.iteration for plan, one in zip(plans, found) if one.fits]
    assert speeds == sorted(speeds)
    for plan, one in zip(plans, found):
        parallel = one.case.settings.parallel
        assert parallel.tensor * parallel.context * parallel.pipeline * one.case.data == num_gpus - one.case.settings.rollout.engine_ranks
        assert parallel.pipeline > 1 or parallel.virtual_pipeline == 1
        assert plan.peak.total <= case.machine.memory_bytes + one.over_device


def test_the_best_layout_can_be_asked_for_by_its_overrides() -> None:
    best = search(llama_case("70b", 64))[0]
    again = llama_case("70b", 64, *best.overrides())
    assert again.settings == best.case.settings
    again.settings.check("train", 64)


@pytest.mark.parametrize("size, num_gpus, host_gib", [("8b", 8, 1000), ("70b", 32, 2000)])
def test_the_recipes_fit_and_are_as_fast_as_what_the_search_finds(size: str, num_gpus: int, host_gib: float) -> None:
    case = llama_case(size, num_gpus, host_gib=host_gib, gpu_memory_gib=80)
    case.settings.check("train", num_gpus)
    assert not Plan.of(case).shortages()
    best = Plan.of(search(case)[0].case).times.iteration
    assert best <= Plan.of(case).times.iteration < 1.03 * best


def test_ranks_are_told_why_each_layout_loses() -> None:
    case = llama_case("8b", 8)
    text = search_table(case, search(case), 4)
    assert text.count("loses to 1:") == 3 and "parallel.tensor=" in text


def test_where_nothing_fits_the_nearest_miss_names_what_lacks_and_what_would_do() -> None:
    case = llama_case("70b", 8, host_gib=1000)
    found = search(case)
    text = nearest_miss(case, found)
    assert "nothing fits" in text and "device: train" in text and "host: a node" in text
    device_bytes, host_bytes = device_bytes_that_fit(found[0]), case.machine.host_bytes + found[0].over_host
    named = replace(found[0].case, machine=replace(case.machine, memory_bytes=device_bytes, host_bytes=host_bytes))
    assert not Plan.of(named).shortages(), "with the memory that is named"
    less = replace(named, machine=replace(named.machine, memory_bytes=device_bytes - 1024))
    assert Plan.of(less).shortages()
    assert "32 devices like these" in text and search(llama_case("70b", 32, host_gib=1000))[0].fits
    assert not search(llama_case("70b", 16, host_gib=1000))[0].fits


def test_devices_that_cannot_be_shared_out() -> None:
    case = llama_case("70b", 7, gpus_per_node=7)
    assert search(case) == [] or not search(case)[0].fits
    with pytest.raises(ConfigError, match=r"parallel.tensor=3 does not divide"):
        Plan.of(llama_case("8b", 6, "parallel.tensor=3"))


def test_the_placements_of_four_70b_models() -> None:
    """The order of the account that the project started from: 32 nodes side by side, 16 with forward-offload, 4 to 8 by time-sharing."""
    case = llama_case("70b", 8, gpu_memory_gib=80)
    found = placements(case)
    needs = {need.what: need.nodes for need in found}
    apart = sum(nodes for what, nodes in needs.items() if what.startswith("side by side"))
    assert needs["time-sharing"] == 4 and needs["forward-offload"] == 8 and apart == 10
    assert "side by side     10     80" in placements_table(case, found)


def test_time_sharing_needs_the_nodes_of_training_one_model() -> None:
    """As few as SFT of the same model: the other roles add nothing to the peak."""
    case = llama_case("70b", 8)
    critic_alone = replace(case, only=tuple(role for role in case.shapes if role.value == "critic"), placement="resident")
    assert fewest_nodes(case, "").nodes == fewest_nodes(critic_alone, "").nodes


def test_recipes_name_shapes_that_are_there() -> None:
    for size in ("8b", "70b"):
        loaded, _ = load_settings(["--config", str(CONFIGS / f"ppo_llama3_{size}.yaml")], "train")
        assert (CONFIGS.parents[1] / loaded.actor.path).resolve() == SHAPES / f"llama3_{size}"
        assert GIB * loaded.rollout.kv_cache_gib > 0

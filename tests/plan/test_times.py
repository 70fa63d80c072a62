"""Predicted seconds follow from FLOPs, bytes and bandwidths as they should; none of them is a measurement."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan.cases import llama_case

from rlhf_mc.models.roles import Role
from rlhf_mc.plan.case import Case, Workload
from rlhf_mc.plan.engine import generate_seconds
from rlhf_mc.plan.times import Flops, pass_seconds, predicted_times


def seconds_of(case: Case, name: str):
    return pass_seconds(case, next(stage for stage in case.stages if stage.name == name))


def test_flops_of_a_short_sequence_are_twice_the_parameters() -> None:
    shape = llama_case("70b", 32).shapes[Role.ACTOR]
    flops = Flops.of(shape, 100, 100, is_value=False)
    without_embedding = shape.num_params - shape.vocab * shape.hidden
    assert flops.linear + flops.head == pytest.approx(200 * without_embedding, rel=0.001)
    assert flops.attention == 4 * shape.num_layers * 100 * 50 * shape.hidden
    assert Flops.of(shape, 200, 0, is_value=True).attention == 4 * flops.attention


def test_training_is_three_forwards_and_whole_layers_again_a_fourth() -> None:
    score, kept, again = (
        seconds_of(llama_case("8b", 8, "algorithm.mini_batch_sequences=128", *more), name).compute
        for name, more in [("score critic", ()), ("train critic", ()), ("train critic", ("trainer.recompute=full",))]
    )
    assert kept == pytest.approx(3 * score) and again == pytest.approx(4 * score, rel=0.01)


def test_the_ends_of_a_pipeline_idle_for_its_length_less_one() -> None:
    found = seconds_of(llama_case("70b", 32), "train actor")
    micro_batches = 64 // 2  # of a step, on each of two data-parallel ranks
    assert found.bubble / (found.compute + found.tensor + found.context) == pytest.approx(3 / micro_batches)
    assert seconds_of(llama_case("8b", 8, "parallel.pipeline=1", "rollout.tensor_parallel=2"), "train actor").bubble == 0


def test_alone_nobody_waits() -> None:
    found = seconds_of(llama_case("8b", 1, "parallel.tensor=1", "parallel.pipeline=1", "rollout.tensor_parallel=1"), "score actor")
    assert found.total == found.compute > 0


def test_decoding_is_bound_by_memory_and_longer_for_longer_responses() -> None:
    case = llama_case("70b", 32)
    halved = replace(case, machine=replace(case.machine, device=replace(case.machine.device, hbm_gbs=3350 / 2)))
    assert 1.5 < generate_seconds(halved) / generate_seconds(case) < 2
    shorter = replace(case, workload=Workload.of(case.settings, response=case.workload.response / 2))
    assert generate_seconds(shorter) < generate_seconds(case) / 2


def test_engines_apart_hide_the_shorter_of_generating_and_scoring() -> None:
    times = predicted_times(llama_case("8b", 12, "rollout.placement=separate", "rollout.engine_ranks=4"))
    scoring = sum(seconds for name, seconds in times.stages.items() if name.startswith("score"))
    assert times.iteration == pytest.approx(sum(times.stages.values()) - min(scoring, times.stages["generate"]))
    assert times.samples_per_second == pytest.approx(128 / times.iteration)

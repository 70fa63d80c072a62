"""Owners of device and host memory by the layout: pure, without models."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from plan.cases import SHAPES, llama_case

from rlhf_mc.models.hf_config import VOCAB_PADDING, read_shape
from rlhf_mc.models.roles import Role
from rlhf_mc.models.weight_layout import engine_pieces, hf_shapes
from rlhf_mc.plan.engine import engine_weight_bytes, sequences_at_once
from rlhf_mc.plan.machine import GIB
from rlhf_mc.plan.memory import all_device_memory, device_memory, host_memory, sharing
from rlhf_mc.plan.plan import Plan

STATES = ("params", "gradient buckets", "main params", "moments")


def stage_named(case, name):
    return next(stage for stage in case.stages if stage.name == name)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True, "tied": True}, {"qk_norm": True, "head_dim": 64}], ids=str)
def test_engine_weights_are_the_pieces_that_a_sync_writes_and_padding(tensor: int, changes: dict) -> None:
    shape = replace(read_shape(SHAPES / "llama3_8b"), num_layers=2, vocab=1000, **changes)
    dims = hf_shapes(shape, value_head=False)
    padding = (-(-shape.vocab // VOCAB_PADDING) * VOCAB_PADDING - shape.vocab) * shape.hidden * (1 if shape.tied else 2)
    pieces = [piece for rank in range(tensor) for piece in engine_pieces(shape, tensor, rank)]
    numel = sum(math.prod(dims[piece.name]) // dims[piece.name][piece.dim] * piece.length for piece in pieces)
    assert tensor * engine_weight_bytes(shape, tensor, 2) == 2 * (numel + padding)


def test_states_follow_the_closed_formula() -> None:
    """6N + 12N/d bytes of a trained role in bf16 with the distributed optimizer, 2N of a frozen one."""
    case = llama_case("70b", 64)
    share = case.shapes[Role.ACTOR].num_params / (4 * 4)  # of a stage in the middle about
    trains = device_memory(case, stage_named(case, "train actor"), 1).owners
    assert sum(trains[owner] for owner in STATES) == pytest.approx(share * (6 + 12 / 4), rel=0.04)
    scores = device_memory(case, stage_named(case, "score reference"), 1).owners
    assert scores["params"] == pytest.approx(2 * share, rel=0.04) and "moments" not in scores


def test_who_is_there_in_which_stage() -> None:
    case = llama_case("8b", 8)
    owners = {row.stage: row.owners.keys() for row in all_device_memory(case) if row.pipeline_stage == 1}
    assert [*owners] == [
        "sync weights", "generate", "score reference", "score reward_model", "score actor", "score critic", "train critic", "train actor"
    ]  # fmt: skip
    assert {"params", "engine weights", "sync buckets"} <= owners["sync weights"] and "KV cache" not in owners["sync weights"]
    assert {"engine weights", "KV cache"} <= owners["generate"] and not owners["generate"] & {*STATES}
    assert not owners["train actor"] & {"engine weights", "KV cache"} and {*STATES, "activations"} <= owners["train actor"]
    assert "logits chunk" in owners["train actor"] and "logits chunk" not in owners["train critic"]


def test_placements_add_what_stays() -> None:
    """Resident: all states in every stage; forward-offload: the trained ones."""
    turns = llama_case("8b", 8)
    trained, everything = replace(turns, placement="forward_offload"), replace(turns, placement="resident")
    rows = {case.placement: Plan.of(case) for case in (turns, trained, everything)}

    def states(case_name: str, stage: str) -> int:
        row = next(row for row in rows[case_name].device if row.stage == stage and row.pipeline_stage == 0)
        return sum(row.owners.get(owner, 0) for owner in STATES)

    both = states("time_sharing", "train actor") + states("time_sharing", "train critic")
    frozen = states("time_sharing", "score reference") + states("time_sharing", "score reward_model")
    assert states("time_sharing", "generate") == 0
    assert states("forward_offload", "generate") == states("forward_offload", "train actor") == both
    assert states("forward_offload", "score reference") == both + states("time_sharing", "score reference")
    assert {states("resident", stage) for stage in ("generate", "score actor", "train critic")} == {both + frozen}
    assert rows["resident"].moved.to_device == 0 < rows["forward_offload"].moved.to_device < rows["time_sharing"].moved.to_device
    assert "reference: params" in rows["forward_offload"].host and "actor: moments" not in rows["forward_offload"].host


def test_recomputing_and_micro_batches_change_activations_only() -> None:
    def activations(*overrides: str) -> tuple[int, int]:
        owners = device_memory(case := llama_case("8b", 8, *overrides), stage_named(case, "train actor"), 0).owners
        return owners["activations"], sum(owners[owner] for owner in STATES)

    kept, states = activations()
    full = activations("trainer.recompute=full")
    twice = activations("actor.micro_batch.tokens=16384")
    assert full[0] < kept / 10 and full[1] == twice[1] == states
    assert twice[0] == pytest.approx(2 * kept, rel=0.02), "and padding, where sequences share kernel calls"


def test_the_first_stage_of_a_pipeline_keeps_most_micro_batches() -> None:
    case = llama_case("70b", 32)
    held = [device_memory(case, stage_named(case, "train actor"), stage).owners["activations"] for stage in range(4)]
    assert held[0] > held[1] > held[2] > held[3]
    assert held[1] == pytest.approx(3 / 4 * held[0], rel=0.01)


def test_host_copies_are_shared_by_ranks_of_a_node() -> None:
    whole = llama_case("8b", 16, "offload.share_host_copies=false")
    shared = llama_case("8b", 16, "offload.share_host_copies=true")
    assert (sharing(whole), sharing(shared)) == (1, 4)  # tensor 2 in nodes of 8
    needs, less = host_memory(whole), host_memory(shared)
    assert less["actor: params"] == pytest.approx(needs["actor: params"] / 4, rel=1e-3)
    assert less["actor: moments"] == needs["actor: moments"]
    assert "reference: main params" not in needs


def test_engines_apart_have_a_rank_of_their_own_in_the_plan() -> None:
    case = llama_case("8b", 12, "rollout.placement=separate", "rollout.engine_ranks=4")
    plan = Plan.of(case)
    apart = [row for row in plan.device if row.pipeline_stage is None]
    assert len(apart) == 1 and {"engine weights", "KV cache"} <= apart[0].owners.keys()
    assert not any("engine weights" in row.owners for row in plan.device if row is not apart[0])
    assert plan.moved.sync_received == plan.moved.sync_written > 0, "all that it has"


def test_kv_cache_bounds_the_sequences_at_once() -> None:
    token = 2 * 32 * 2 * 128 * 2  # layers, key/value heads of a rank, head_dim, bytes
    case = llama_case("8b", 8, "rollout.kv_cache_gib=1")
    assert sequences_at_once(case) == GIB // (8192 * token)
    assert sequences_at_once(llama_case("8b", 8, "rollout.kv_cache_gib=1000")) == 64, "128 sequences on two replicas"

"""Bytes moved, against the formulas of HybridFlow and of the sharded optimizer, and against plans made block by block."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan.cases import SHAPES, llama_case

from rlhf_mc.models.hf_config import read_shape
from rlhf_mc.models.roles import Role
from rlhf_mc.parallel.grids import RolloutGrid, TrainingGrid
from rlhf_mc.parallel.reshard import plan_reshard
from rlhf_mc.models.weight_layout import Shard, engine_pieces, hf_shapes, pieces_of
from rlhf_mc.plan.movement import moved, sync_received


@pytest.mark.parametrize("tensor, pipeline, rollout", [(2, 1, 1), (4, 1, 1), (4, 1, 2), (2, 2, 1), (2, 2, 2), (2, 2, 4), (1, 4, 2), (4, 2, 4)])
def test_a_sync_receives_what_the_plan_of_blocks_says(tensor: int, pipeline: int, rollout: int) -> None:
    """Of a model whose embeddings are small beside its layers: these the plan of blocks cannot always keep in place."""
    sizes = (f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}", f"rollout.tensor_parallel={rollout}")
    shape = replace(read_shape(SHAPES / "llama3_8b"), num_layers=8, vocab=512)
    case = llama_case("8b", tensor * pipeline, *sizes)
    case = replace(case, shapes=dict.fromkeys(case.shapes, shape))
    training = TrainingGrid(tensor * pipeline, 0, tensor, pipeline)
    grid = RolloutGrid(training, rollout)
    held = [pieces_of(shape, Shard.of(shape, replace(training, rank=rank), False)) for rank in training.model_ranks()]
    wanted = [engine_pieces(shape, rollout, shard) for shard in grid.shards_of_model()]
    plan = plan_reshard(held, wanted, hf_shapes(shape, False), 2, 64 << 20, tensor, rollout)
    assert sync_received(case) == pytest.approx(max(plan.received), rel=0.02, abs=plan.model_bytes / 1000)


def test_states_move_by_the_formula_of_the_sharded_optimizer() -> None:
    """H2D 4 x 2N + 2 x 12N/d, D2H 2 x 12N/d + 2 x 2N, of N params a rank and d copies (offload/minimum.py)."""
    case = llama_case("70b", 128, "offload.share_host_copies=false")
    d, n = 128 // 16, case.shapes[Role.ACTOR].num_params / 16
    found = moved(case)
    assert found.to_device == pytest.approx(8 * n + 24 * n / d, rel=0.04)
    assert found.to_host == pytest.approx(24 * n / d + 4 * n, rel=0.04)
    assert found.gathered == 0


def test_shared_host_copies_move_less_and_are_gathered() -> None:
    whole, shared = (moved(llama_case("70b", 128, f"offload.share_host_copies={share}")) for share in ("false", "true"))
    params = whole.to_device - shared.to_device
    assert params > 0
    assert shared.gathered == pytest.approx(params, rel=1e-3), "what does not come from the host comes from the others"

"""Weight sync to engines on ranks of their own, over a real bridge: every element, who sends, damage, and the stated bound."""

from __future__ import annotations

import pytest
import torch
from ranks import Layout, RankPool
from tiny_models import save_model, tiny_language_model
from transformers import AutoModelForCausalLM

from rlhf_mc.models.hf_config import read_shape
from rlhf_mc.models.weight_layout import engine_pieces
from rlhf_mc.parallel.grids import RolloutGrid, TrainingGrid
from rlhf_mc.pipeline.weight_sync import plan_sync_apart


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """A tied model that two ranks can share."""
    return save_model(tiny_language_model("qwen2", num_attention_heads=8, num_key_value_heads=4), tmp_path_factory.mktemp("apart") / "model")


# (trainer TP, PP, trainer ranks, engine ranks, rollout TP)
SIDES = [(2, 1, 2, 1, 1), (1, 1, 2, 2, 2), (1, 2, 2, 2, 1)]


def sync(ranks: RankPool, path: str, tmp_path, sides: tuple[int, ...], victim: int | None = None) -> list[dict]:
    tensor, pipeline, trainers, engines, rollout = sides
    places = dict(tensor=tensor, pipeline=pipeline, engines=engines, rollout=rollout)
    function, store = "pipeline.apart_on_ranks:sync", str(tmp_path / "store")
    return ranks.run(function, Layout(data=trainers + engines), path=path, store=store, victim=victim, **places)


@pytest.mark.parametrize("sides", SIDES, ids=["TP2->1", "DP2->TP2", "PP2->2x1"])
def test_every_element_of_every_engine_shard_arrives(ranks, path, tmp_path, sides):
    shape, weights = read_shape(path, "actor.path"), AutoModelForCausalLM.from_pretrained(path).state_dict()
    _, _, trainers, engines, rollout = sides
    answers = sync(ranks, path, tmp_path, sides)
    assert [answer["error"] for answer in answers] == [""] * (trainers + engines)
    for answer in answers[trainers:]:
        for piece in engine_pieces(shape, rollout, answer["tensor_rank"]):
            written = answer["engine"][piece.param].narrow(piece.dim, piece.start, piece.length)
            assert torch.equal(written, weights[piece.name].narrow(piece.dim, piece.whole_start, piece.length)), piece
    sent, received = answers[0]["sent"], answers[0]["received"]
    assert not any(received[:trainers]) and not any(sent[trainers:])
    assert max(sent) < 1.1 * min(sent[:trainers]), "all copies of the model share in sending it"


def test_one_flipped_bit_stops_both_sides(ranks, path, tmp_path):
    answers = sync(ranks, path, tmp_path, SIDES[0], victim=2)
    assert len(answers) == 3
    for answer in answers:
        assert answer["error"].startswith("ReshardError: weight sync: 1 of") and "as written on rank 2 of the job" in answer["error"]


def test_the_plan_states_the_bound_of_engines_apart(path):
    shape = read_shape(path, "actor.path")
    plan = plan_sync_apart(shape, TrainingGrid(4, 0, 2, 1), RolloutGrid.apart(2, 0, 1), element_bytes=2)
    assert plan.apart and plan.bound == plan.model_bytes == max(plan.received)
    assert "its whole shard, as an engine rank holds nothing of the trainer's" in plan.explanation()
    assert sum(plan.sent) == 2 * plan.model_bytes

"""Weight sync over real collectives: every element of every engine shard, for all layouts and families; damage; what is sent."""

from __future__ import annotations

import pytest
import torch
from pipeline.on_ranks import PADDING_ROWS, WANTED_COLUMNS, columns_plan, heads_weights
from ranks import Layout, RankError, RankPool
from tiny_models import save_model, tiny_language_model
from transformers import AutoModelForCausalLM

from rlhf_mc.medusa.shape import engine_pieces as heads_pieces
from rlhf_mc.models.hf_config import read_shape
from rlhf_mc.models.weight_layout import engine_pieces
from rlhf_mc.pipeline.weight_sync import probe_sequence

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
LAYOUTS = [  # ordered by training layout, whose groups are then kept
    (Layout(tensor=2), 1),
    (Layout(tensor=2), 2),
    (Layout(tensor=2, pipeline=2), 1),
    (Layout(tensor=2, pipeline=2), 2),
    (Layout(tensor=2, pipeline=2), 4),
    (Layout(tensor=2, pipeline=2, virtual=2), 2),
    (Layout(tensor=4), 2),
    (Layout(tensor=2, data=2), 1),
    (Layout(tensor=2, context=2), 2),
]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """family -> directory of a tiny model that four ranks can share: 8 heads, 4 key/value heads, 101 tokens."""
    root = tmp_path_factory.mktemp("sync")

    def directory(family: str) -> str:
        path = root / family
        if not path.exists():
            save_model(tiny_language_model(family, num_attention_heads=8, num_key_value_heads=4), path)
        return str(path)

    return directory


@pytest.mark.parametrize(("layout", "rollout"), LAYOUTS, ids=[f"{layout}->TP{rollout}" for layout, rollout in LAYOUTS])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_of_every_shard_arrives(ranks: RankPool, model_of, family: str, layout: Layout, rollout: int) -> None:
    path = model_of(family)
    shape, weights = read_shape(path, "actor.path"), AutoModelForCausalLM.from_pretrained(path).state_dict()
    # Buckets far smaller than the model, so that there are many and some weights are cut.
    for rank in ranks.run("pipeline.on_ranks:sync", layout, path=path, rollout=rollout, bucket_bytes=6000):
        pieces = engine_pieces(shape, rollout, rank["tensor_rank"])
        filled = {name: torch.zeros(len(tensor), dtype=torch.bool) for name, tensor in rank["engine"].items()}
        for piece in pieces:
            expected = weights[piece.name].narrow(piece.dim, piece.whole_start, piece.length)
            written = rank["engine"][piece.param].narrow(piece.dim, piece.start, piece.length)
            assert torch.equal(written, expected), piece
            assert torch.equal(rank["loaded"][piece.name].narrow(piece.dim, piece.whole_start, piece.length), expected), piece
            if piece.dim == 0:
                filled[piece.param][piece.start : piece.start + piece.length] = True
        for name, rows in filled.items():
            if rows.any():
                padding = rank["engine"][name][~rows]
                assert len(padding) == PADDING_ROWS and not padding.any(), f"{name}: padding was left as it was"
        assert rank["same"], "blocks that travel directly arrive otherwise"
        assert rank["calls"] == ["begin", "end"] * 2
        assert ("lm_head.weight" in rank["loaded"]) or rank["tensor_rank"] > 0
        assert (rank["received"] == 0) == (layout.pipeline == 1 and rollout == layout.tensor)


@pytest.mark.parametrize(
    ("layout", "rollout", "shared_output"),
    [(Layout(tensor=2), 1, False), (Layout(tensor=2), 2, False), (Layout(tensor=2, pipeline=2), 2, False), (Layout(tensor=2, pipeline=2), 4, True)],
)
def test_draft_heads_arrive_with_the_model(ranks: RankPool, model_of, layout: Layout, rollout: int, shared_output: bool) -> None:
    weights = AutoModelForCausalLM.from_pretrained(model_of("llama")).state_dict()
    for rank in ranks.run("pipeline.on_ranks:sync_with_heads", layout, path=model_of("llama"), rollout=rollout, shared_output=shared_output):
        whole = heads_weights(rank["heads"])
        for piece in heads_pieces(rank["heads"], rollout, rank["tensor_rank"]):
            expected = whole[piece.name].narrow(0, piece.whole_start, piece.length)
            assert torch.equal(rank["drafter"][piece.param][piece.start : piece.start + piece.length], expected), piece
        assert set(rank["drafter"]) == set(rank["heads"].tensors())
        assert torch.equal(rank["model"]["model.norm.weight"][:-PADDING_ROWS], weights["model.norm.weight"])


def test_columns_are_in_one_stretch_where_they_are_all_that_one_side_has() -> None:
    blocks = {(block.source, block.target): block for bucket in columns_plan().buckets for block in bucket}
    # On both sides, the target's, the source's, none (twice), and one that the target holds itself.
    expected = {(1, 0): True, (0, 1): True, (1, 2): True, (1, 3): True, (0, 3): False, (2, 3): False, (2, 2): True}
    assert {pair: block.in_one_stretch for pair, block in blocks.items()} == expected
    cut = [block for bucket in columns_plan(bucket_bytes=60).buckets if bucket.num_parts > 1 for block in bucket]
    assert cut and not any(block.in_one_stretch for block in cut)


def test_columns_travel_directly_or_packed(ranks: RankPool) -> None:
    whole = torch.arange(60.0).view(5, 12)
    answers = ranks.run("pipeline.on_ranks:sync_columns", Layout(tensor=4), victim=None)
    for (columns, error), (start, end) in zip(answers, WANTED_COLUMNS, strict=True):
        assert torch.equal(columns, whole[:, start:end]) and not error
    for victim in range(4):
        for _, error in ranks.run("pipeline.on_ranks:sync_columns", Layout(tensor=4), victim=victim):
            assert "1 of 4 checksums differ" in error and f"as written on rank {victim}" in error


def test_one_flipped_bit_stops_every_rank(ranks: RankPool, model_of) -> None:
    errors = ranks.run(
        "pipeline.on_ranks:sync_with_a_flipped_bit", Layout(tensor=2, pipeline=2), path=model_of("llama"), rollout=2, victim=2
    )
    assert len(errors) == 4
    for error in errors:
        assert error.startswith("ReshardError: weight sync: 1 of") and "as written on rank 2 of the model group" in error


def test_a_rank_that_fails_in_the_middle_ends_the_others(ranks: RankPool, model_of) -> None:
    with pytest.raises(RankError, match="no room on rank 1"):
        ranks.run("pipeline.on_ranks:sync_where_a_rank_fails", Layout(tensor=2), path=model_of("llama"), rollout=1)


def test_one_exchange_for_each_bucket_and_none_where_all_is_local(ranks: RankPool, model_of) -> None:
    path = model_of("qwen2")
    for exchanges, buckets in ranks.run("pipeline.on_ranks:count_collectives", Layout(tensor=2), path=path, rollout=1):
        assert exchanges == buckets > 1
    for exchanges, _ in ranks.run("pipeline.on_ranks:count_collectives", Layout(tensor=2), path=path, rollout=2):
        assert exchanges == 0


def test_the_probe_is_the_prompt_and_then_tokens_of_the_whole_vocabulary() -> None:
    probe = probe_sequence([5, 6, 7], vocab=100, max_tokens=20)
    assert probe.tokens[:3].tolist() == [5, 6, 7] and len(probe.tokens) == 20 and len(set(probe.tokens.tolist())) > 10
    assert probe.loss_mask.tolist() == [False] + [True] * 19
    assert torch.equal(probe.tokens, probe_sequence([5, 6, 7], vocab=100, max_tokens=20).tokens)
    assert len(probe_sequence(list(range(90)), vocab=100, max_tokens=64).tokens) == 32

"""The plan from training shards to rollout shards: what it must hold for any pieces, and its bytes on real layouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.models.weight_layout import Shard, engine_pieces, hf_shapes, pieces_of
from rlhf_mc.parallel.grids import RolloutGrid, TrainingGrid
from rlhf_mc.parallel.reshard import Piece, ReshardPlan, plan_reshard

BUCKET = 1 << 20


@dataclass(frozen=True)
class Layout:
    tensor: int
    pipeline: int
    rollout: int
    virtual: int = 1

    def __str__(self) -> str:
        return f"TP{self.tensor}xPP{self.pipeline}xVP{self.virtual}->TP{self.rollout}"


REACHED = [Layout(1, 1, 1), Layout(2, 1, 1), Layout(2, 1, 2), Layout(2, 2, 1), Layout(2, 2, 2), Layout(4, 1, 2), Layout(4, 2, 2)]
REACHED += [Layout(2, 2, 1, virtual=3), Layout(2, 2, 2, virtual=3)]
EXCEEDED = [Layout(1, 2, 2), Layout(2, 2, 4), Layout(2, 3, 3)]


def shape(tied: bool, vocab: int = 32000, heads: int = 12) -> ModelShape:
    """A model large enough that norms hardly count."""
    return ModelShape(
        family="qwen2", num_layers=6, hidden=768, num_heads=heads, num_kv_heads=heads, head_dim=64, ffn=3072, vocab=vocab,
        norm_eps=1e-5, tied=tied, qkv_bias=True, qk_norm=False, rope={}, sliding_window=None, max_positions=4096, has_value_head=False,
    )  # fmt: skip


def plan_of(model: ModelShape, layout: Layout, bucket_bytes: int = BUCKET) -> ReshardPlan:
    training = TrainingGrid(layout.tensor * layout.pipeline, 0, layout.tensor, layout.pipeline, virtual=layout.virtual)
    grid, places = RolloutGrid(training, layout.rollout), [replace(training, rank=rank) for rank in training.model_ranks()]
    held = [pieces_of(model, Shard.of(model, place, False)) for place in places]
    wanted = [engine_pieces(model, layout.rollout, shard) for shard in grid.shards_of_model()]
    return plan_reshard(held, wanted, hf_shapes(model, False), 2, bucket_bytes, layout.tensor, layout.rollout)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", REACHED, ids=str)
def test_no_rank_receives_more_than_the_bound(layout, tied):
    plan = plan_of(shape(tied), layout)
    assert max(plan.received) <= 1.02 * plan.bound
    assert "more" not in plan.explanation()


def test_the_bytes_are_those_that_the_blocks_have():
    plan = plan_of(shape(False), Layout(2, 2, 1))
    received = Counter()
    for block in (block for bucket in plan.buckets for block in bucket if not block.is_local):
        received[block.target] += 2 * block.numel
    assert [received[rank] for rank in range(4)] == list(plan.received)
    assert sum(plan.sent) == sum(plan.received)


@pytest.mark.parametrize("layout", EXCEEDED, ids=str)
def test_a_layout_that_cannot_reach_the_bound_says_by_how_much_and_why(layout):
    plan = plan_of(shape(False), layout)
    said = plan.explanation()
    assert plan.excess > 0 and f"{plan.excess / 2**20:,.1f} MiB more" in said and "exceeds training TP" in said
    # What a rank cannot hold before the sync: all of its rollout shard but the layers of its own stage.
    shard = plan.model_bytes / layout.rollout
    assert max(plan.received) <= shard * (1 - 1 / layout.pipeline) * 1.1 + shard * 0.35


def test_a_vocabulary_that_is_no_multiple_of_anything_costs_nothing():
    assert plan_of(shape(False, vocab=32003), Layout(4, 1, 2)).excess <= 0.02 * plan_of(shape(False), Layout(4, 1, 2)).bound
    assert max(plan_of(shape(False, vocab=32003), Layout(2, 1, 2)).received) == 0


@pytest.mark.parametrize("bucket_bytes", [1 << 14, 1 << 17, 1 << 20, 1 << 30])
def test_buckets_hold_their_size(bucket_bytes):
    plan = plan_of(shape(True), Layout(2, 2, 1), bucket_bytes)
    row = 2 * 3072  # the longest row that a block can have
    for bucket in plan.buckets:
        loads = Counter()
        for block in bucket:
            if not block.is_local:
                loads["out", block.source] += 2 * block.numel
                loads["in", block.target] += 2 * block.numel
        assert max(loads.values(), default=0) <= bucket_bytes + row * sum(not block.is_local for block in bucket)
    assert sum(plan.received) == sum(plan_of(shape(True), Layout(2, 2, 1)).received)


def test_the_shares_of_all_ranks_are_the_buckets():
    """Also where a module is cut into parts, along rows and along columns."""
    plan = plan_of(shape(True), Layout(2, 2, 1), 1 << 17)
    assert any(bucket.num_parts > 1 for bucket in plan.buckets)
    shares = [list(plan.shares(rank)) for rank in range(4)]
    for number, bucket in enumerate(plan.buckets):
        of_ranks = [shares[rank][number] for rank in range(4)]
        assert Counter(bucket) == Counter(block for share in of_ranks for block in share.wanted)
        assert Counter(b for b in bucket if not b.is_local) == Counter(block for share in of_ranks for block in share.sends)
        assert of_ranks == [bucket.share(rank) for rank in range(4)]
    assert plan.row_numels() == {block.dims[-1] for bucket in plan.buckets for block in bucket}


def test_all_pipeline_stages_send_at_once():
    plan = plan_of(shape(False, vocab=1000), Layout(1, 2, 1), 20 << 20)
    senders = [{block.source for block in bucket if not block.is_local} for bucket in plan.buckets]
    assert sum(senders_of == {0, 1} for senders_of in senders) > len(senders) / 2


def test_weights_of_one_engine_module_share_a_bucket():
    plan = plan_of(shape(False), Layout(2, 2, 1), 16 << 20)
    places: dict[str, set[int]] = {}
    for number, bucket in enumerate(plan.buckets):
        for block in bucket:
            places.setdefault(block.target_param.rpartition(".")[0], set()).add(number)
    split = {module for module, numbers in places.items() if len(numbers) > 1}
    assert split <= {"model.embed_tokens", "lm_head"}


@st.composite
def scattered(draw):
    """Rows of one tensor, held in pieces by ranks that overlap, and wanted in pieces that need not match."""
    rows, num_ranks = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    held: list[list[Piece]] = [[] for _ in range(num_ranks)]
    at = 0
    while at < rows:
        length = draw(st.integers(1, rows - at))
        for rank in draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)):
            start = sum(piece.length for piece in held[rank])
            held[rank].append(Piece("held", "w", 0, start, at, length))
        at += length
    wanted = []
    for _ in range(num_ranks):
        start = draw(st.integers(0, rows - 1))
        wanted.append([Piece("wanted.weight", "w", 0, 3, start, draw(st.integers(1, rows - start)))])
    return rows, held, wanted


@given(scattered(), st.integers(1, 200))
def test_every_wanted_row_comes_once_from_who_holds_it(case, bucket_bytes):
    rows, held, wanted = case
    plan = plan_reshard(held, wanted, {"w": (rows, 5)}, 2, bucket_bytes, 1, 1)
    arrived: list[Counter] = [Counter() for _ in held]
    for block in (block for bucket in plan.buckets for block in bucket):
        assert block.dims == (block.length, 5)
        for row in range(block.length):
            whole = block.whole_start + row
            source = {p.start + r: p.whole_start + r for p in held[block.source] for r in range(p.length)}
            target = {p.start + r: p.whole_start + r for p in wanted[block.target] for r in range(p.length)}
            assert source[block.source_start + row] == target[block.target_start + row] == whole
            arrived[block.target][whole] += 1
            owns = any(p.whole_start <= whole < p.whole_end for p in held[block.target])
            assert block.is_local == owns
    for counts, pieces in zip(arrived, wanted, strict=True):
        assert counts == Counter(row for p in pieces for row in range(p.whole_start, p.whole_end))


def test_a_row_that_nobody_holds_is_an_error():
    with pytest.raises(ValueError, match="row 3 of w is held by no rank"):
        plan_reshard([[Piece("a", "w", 0, 0, 0, 3)]], [[Piece("b", "w", 0, 0, 0, 4)]], {"w": (4, 2)}, 2, 100, 1, 1)

"""A role that is saved and read trains on to the same bits, on every layout; so do the generators."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from checkpoint.on_ranks import VOCAB
from ranks import Layout

from rlhf_mc.checkpoint.layout import Layout as SavedLayout

CASES = [
    pytest.param(Layout(), dict(dtype="bf16", distributed=True), id="1rank-bf16"),
    pytest.param(Layout(), dict(dtype="bf16", distributed=False), id="1rank-bf16-plain"),
    pytest.param(Layout(), dict(dtype="fp32", distributed=False, offload=False), id="1rank-fp32-plain-no-offload"),
    pytest.param(Layout(data=2), dict(dtype="bf16", distributed=True, share=True), id="DP2-bf16-shared"),
    pytest.param(Layout(data=2), dict(dtype="fp32", distributed=True), id="DP2-fp32"),
    pytest.param(Layout(data=2), dict(dtype="fp32", distributed=True, share=True), id="DP2-fp32-shared"),
    pytest.param(Layout(data=2), dict(dtype="fp32", distributed=False), id="DP2-fp32-plain"),
    pytest.param(Layout(tensor=2), dict(dtype="bf16", distributed=False), id="TP2-bf16-plain"),
    pytest.param(Layout(pipeline=2), dict(dtype="bf16", distributed=True), id="PP2-bf16"),
    pytest.param(Layout(pipeline=2, virtual=2), dict(dtype="bf16", distributed=True), id="PP2xVP2-bf16"),
]


@pytest.mark.parametrize(("layout", "options"), CASES)
def test_what_is_read_is_what_was_saved_and_trains_on_alike(ranks, language_model, value_model, tmp_path, layout, options):
    models = dict(language=language_model("llama"), value=value_model("qwen2"))
    different = ranks.run("checkpoint.on_ranks:saved_and_read", layout, directory=str(tmp_path), **models, **options)
    assert different == [[]] * layout.size


def test_generators_go_on(ranks, tmp_path):
    assert ranks.run("checkpoint.on_ranks:draws_after_reading", Layout(data=2), directory=str(tmp_path)) == [True, True]


ONE, TP2, PP2, INTERLEAVED = Layout(), Layout(tensor=2), Layout(pipeline=2), Layout(pipeline=2, virtual=2)
ROADS = [
    (Layout(data=2), True, [(TP2, True), (ONE, False), (INTERLEAVED, True), (PP2, True), (INTERLEAVED, True), (Layout(data=2), True)]),
    (TP2, False, [(PP2, True), (Layout(data=2), False), (Layout(tensor=2, pipeline=2, virtual=2), True), (TP2, False)]),
]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("start, distributed, road", ROADS, ids=["from-DP2", "from-TP2-plain"])
def test_over_other_layouts_and_back_every_bit_returns(ranks, value_model, tmp_path, start, distributed, road, dtype):
    """Each layout reads what the one before wrote; the last is the first again. Whole tensors stay the same all along.

    The vocabulary is so small that on TP2 one rank has nothing but rows that pad it.
    """
    language = tiny_models.save_model(tiny_models.tiny_language_model("qwen3", vocab_size=VOCAB), tmp_path / "language")
    options = dict(language=language, value=value_model("qwen2"), dtype=dtype)
    answers = ranks.run("checkpoint.on_ranks:handed_on", start, target=f"{tmp_path}/0", distributed=distributed, **options)
    whole, files = answers[0][0], [answer[1] for answer in answers]
    saved = layout(start, distributed)
    for number, (now, optimizer) in enumerate(road):
        places = dict(source=f"{tmp_path}/{number}", target=f"{tmp_path}/{number + 1}")
        answers = ranks.run("checkpoint.on_ranks:handed_on", now, distributed=optimizer, saved=saved, **places, **options)
        found = answers[0][0]
        assert found.keys() == whole.keys() and len(whole) > 30
        assert [name for name in whole if not torch.equal(whole[name], found[name])] == [], str(now)
        saved = layout(now, optimizer)
    assert [answer[1] for answer in answers] == files


def layout(grid: Layout, distributed: bool) -> SavedLayout:
    return SavedLayout(grid.size, grid.tensor, grid.pipeline, distributed, grid.virtual)

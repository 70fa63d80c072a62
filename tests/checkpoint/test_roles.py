"""A role that is saved and read trains on to the same bits, on every layout; so do the generators."""

from __future__ import annotations

import pytest
from ranks import Layout

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
]


@pytest.mark.parametrize(("layout", "options"), CASES)
def test_what_is_read_is_what_was_saved_and_trains_on_alike(ranks, language_model, value_model, tmp_path, layout, options):
    models = dict(language=language_model("llama"), value=value_model("qwen2"))
    different = ranks.run("checkpoint.on_ranks:saved_and_read", layout, directory=str(tmp_path), **models, **options)
    assert different == [[]] * layout.size


def test_generators_go_on(ranks, tmp_path):
    assert ranks.run("checkpoint.on_ranks:draws_after_reading", Layout(data=2), directory=str(tmp_path)) == [True, True]

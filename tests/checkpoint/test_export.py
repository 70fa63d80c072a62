"""A role that one process takes out of the files of all ranks is what these ranks save together, byte for byte."""

from __future__ import annotations

import pytest
import torch
from ranks import Layout
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

CASES = [(Layout(tensor=2, pipeline=2), "bf16", True), (Layout(data=2), "fp32", True), (Layout(tensor=2), "fp32", False)]


@pytest.mark.parametrize(("layout", "dtype", "distributed"), CASES, ids=str)
@torch.no_grad()
def test_every_role_comes_out_as_it_was(ranks, language_model, value_model, tmp_path, layout, dtype, distributed):
    models = dict(language=language_model("qwen3"), value=value_model("qwen2"))
    ranks.run("checkpoint.on_ranks:published", layout, root=str(tmp_path), dtype=dtype, distributed=distributed, **models)
    (errors,) = ranks.run("checkpoint.on_ranks:export_roles", root=str(tmp_path))
    for role in ("actor", "critic", "medusa"):
        saved, exported = ({file.name: file.read_bytes() for file in (tmp_path / at / role).iterdir()} for at in (".", "exported"))
        assert saved == exported and "model.safetensors" in saved, role
    assert "critic.safetensors: it has" in errors["critic"] and errors["reward_model"].endswith("the run did not train one")
    for role, kind in (("actor", AutoModelForCausalLM), ("critic", AutoModelForSequenceClassification)):
        model, report = kind.from_pretrained(tmp_path / "exported" / role, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert torch.isfinite(model(torch.tensor([[1, 3, 5]])).logits).all()

"""Draft heads in SFT: with the model in one forward, or alone on a model that stays as it is, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Layout, RankPool
from tiny_models import random_batch, save_model, tiny_language_model

BATCH = random_batch([9, 13, 5, 20, 11])
OPTIM = dict(lr=1e-2, schedule="constant")
NUM_STEPS = 3
HEADS = dict(num_heads=2, num_layers=1)
LAYOUTS = pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(pipeline=2)], ids=str)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A directory with all that saving a model copies."""
    path = tmp_path_factory.mktemp("model") / "llama"
    save_model(tiny_language_model("llama"), path)
    return str(path)


def steps(ranks: RankPool, layout: Layout, model: str, output: Path, medusa: dict[str, Any] | None) -> list[dict[str, Any]]:
    return ranks.run(
        "medusa.on_ranks:supervised", layout, directory=model, batch=BATCH, medusa=medusa, optim=OPTIM, num_steps=NUM_STEPS, output=str(output)
    )


def same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[bool]:
    return [torch.equal(weight, after[name]) for name, weight in before.items()]


@LAYOUTS
def test_heads_alone_leave_the_model_as_it_is(ranks: RankPool, model, tmp_path, layout: Layout) -> None:
    results = steps(ranks, layout, model, tmp_path, HEADS)
    for result in results:
        (weights, before), (weights_after, after) = result["before"], result["after"]
        assert all(same(weights, weights_after)) and before["val/loss"] == after["val/loss"]
        losses = [line["train/medusa/loss"] for line in result["metrics"]]
        assert losses[0] > losses[1] > losses[2] and result["metrics"] == results[0]["metrics"]
        assert not any("/loss" == name[5:] for line in result["metrics"] for name in line), "no loss of a model that does not learn"
        assert "the model is frozen, and only its draft heads are trained" in result["said"][1]
        assert f"the model stays as it is in {model}" in result["said"][2]
    assert all(weight.any() for weight in results[0]["reloaded"].values()), "heads start as zeros"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["medusa"]


def test_heads_go_on_from_medusa_path(ranks: RankPool, model, tmp_path) -> None:
    [first] = steps(ranks, Layout(), model, tmp_path / "first", HEADS)
    [second] = steps(ranks, Layout(), model, tmp_path / "second", HEADS | {"path": str(tmp_path / "first" / "medusa")})
    assert second["before"][1] == first["after"][1]
    assert f"weights from {tmp_path}/first/medusa, trained" in second["said"][0]
    assert second["metrics"][0]["train/medusa/loss"] < first["metrics"][-1]["train/medusa/loss"]


@LAYOUTS
def test_model_and_heads_learn_in_one_forward(ranks: RankPool, model, tmp_path, layout: Layout) -> None:
    results = steps(ranks, layout, model, tmp_path, HEADS | {"joint_weight": 0.5})
    plain = steps(ranks, layout, model, tmp_path / "plain", None)[0]
    for result in results:
        assert not any(same(result["before"][0], result["after"][0]))
        for name in ("train/loss", "train/medusa/loss", "train/medusa/head_2/loss"):
            first, *_, last = [line[name] for line in result["metrics"]]
            assert last < first
        assert result["metrics"][0]["train/loss"] == plain["metrics"][0]["train/loss"], "the same forward"
        assert result["metrics"][0]["train/grad_norm"] != plain["metrics"][0]["train/grad_norm"], "the heads' loss reaches the model"
        accuracies = [f"val/medusa_head_{k}_accuracy" for k in (1, 2)]
        assert list(result["after"][1]) == [*plain["after"][1], *accuracies]
        assert all(result["after"][1][name] > result["before"][1][name] for name in accuracies)
    assert all(weight.any() for weight in results[0]["reloaded"].values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["medusa", "model", "plain"]

"""Weights come in from Hugging Face directories and go out again bit for bit, whatever the layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import Layout, RankPool
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import random_batch, reference_logprobs, reference_scores, save_model, tiny_language_model, tiny_value_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

BATCH = random_batch([9, 4, 12])
LAYOUTS = [Layout(), Layout(tensor=2), Layout(pipeline=2), Layout(context=2), Layout(tensor=2, pipeline=2, virtual=2)]


def tensors_in(directory: str) -> dict[str, torch.Tensor]:
    return {name: tensor for file in Path(directory).glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, precisions and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_export_and_save_give_the_original_bits(ranks: RankPool, language_model, tmp_path, layout: Layout, family: str) -> None:
    """llama and qwen3 are tied, qwen2 is not and has biases."""
    source, target = language_model(family), str(tmp_path / "saved")
    for exported in ranks.run("models.on_ranks:export_and_save", layout, directory=source, target=target):
        assert_same_tensors(exported, tensors_in(source))
    assert_same_tensors(tensors_in(target), tensors_in(source))
    with torch.no_grad():
        reloaded, _ = reference_logprobs(AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager"), BATCH)
        original, _ = reference_logprobs(tiny_language_model(family), BATCH)
    torch.testing.assert_close(reloaded, original, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_saved_value_model_is_a_classifier(ranks: RankPool, value_model, tmp_path, layout: Layout, family: str) -> None:
    source, target = value_model(family), str(tmp_path / "saved")
    for exported in ranks.run("models.on_ranks:export_and_save", layout, directory=source, target=target, head="value"):
        assert_same_tensors(exported, tensors_in(source))
    assert_same_tensors(tensors_in(target), tensors_in(source))
    with torch.no_grad():
        model = AutoModelForSequenceClassification.from_pretrained(target, attn_implementation="eager")
        reloaded = reference_scores(model, BATCH)
        original = reference_scores(tiny_value_model(family), BATCH)
    torch.testing.assert_close(reloaded, original, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_language_model_saved_as_value_model(ranks: RankPool, language_model, tmp_path, family: str) -> None:
    """The body's bits, no output layer, and a new head of zeros; transformers takes it as a classifier with one label."""
    source, target = language_model(family), str(tmp_path / "saved")
    ranks.run("models.on_ranks:export_and_save", Layout(pipeline=2), directory=source, target=target, head="value")
    expected = {name: tensor for name, tensor in tensors_in(source).items() if name != "lm_head.weight"}
    assert_same_tensors(tensors_in(target), {**expected, "score.weight": torch.zeros(1, 32)})
    model = AutoModelForSequenceClassification.from_pretrained(target)
    assert model.config.num_labels == 1
    assert not reference_scores(model, BATCH).any()


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, pipeline=2)], ids=str)
def test_a_bf16_model_is_saved_in_bf16_and_its_value_head_in_fp32(
    ranks: RankPool, value_model, tmp_path, layout: Layout
) -> None:
    source, target = value_model("qwen3"), str(tmp_path / "saved")
    arguments = dict(directory=source, target=target, head="value", dtype="bf16")
    ranks.run("models.on_ranks:export_and_save", layout, **arguments)
    original = tensors_in(source)
    rounded = {name: tensor if name == "score.weight" else tensor.bfloat16() for name, tensor in original.items()}
    assert_same_tensors(tensors_in(target), rounded)
    assert json.loads((Path(target) / "config.json").read_text())["dtype"] == "bfloat16"


def test_several_files_have_an_index_that_both_sides_read(ranks: RankPool, language_model, tmp_path) -> None:
    source, target, again = language_model("mistral"), str(tmp_path / "saved"), str(tmp_path / "again")
    arguments = dict(directory=source, target=target, file_bytes=20_000, bucket_bytes=9_000)
    ranks.run("models.on_ranks:save_in_files_of", Layout(tensor=2), **arguments)
    files = sorted(path.name for path in Path(target).glob("*.safetensors"))
    index = json.loads((Path(target) / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    for name, file in index["weight_map"].items():
        with safe_open(Path(target) / file, framework="pt") as handle:
            assert name in handle.keys()
    assert_same_tensors(AutoModelForCausalLM.from_pretrained(target).state_dict(), tensors_in(source))
    ranks.run("models.on_ranks:export_and_save", Layout(tensor=2), directory=target, target=again)
    assert_same_tensors(tensors_in(again), tensors_in(source))
    assert not (Path(again) / "model.safetensors.index.json").exists(), "the source's index must not follow a single file"


def test_companions_follow_and_weights_of_other_formats_do_not(ranks: RankPool, tmp_path) -> None:
    source, target = tmp_path / "source", tmp_path / "saved"
    tiny_language_model("llama").save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"old weights")
    ranks.run("models.on_ranks:export_and_save", directory=str(source), target=str(target))
    names = {path.name for path in target.iterdir()}
    assert "tokenizer.json" in names and "pytorch_model.bin" not in names


def test_a_full_disk_stops_all_ranks_and_leaves_the_last_one_whole(ranks: RankPool, language_model, tmp_path) -> None:
    target = tmp_path / "saved"
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"the last good one")
    arguments = dict(directory=language_model("llama"), target=str(target))
    first, second = ranks.run("models.on_ranks:saved_on_full_disk", Layout(tensor=2), **arguments)
    assert first == second and first.startswith(f"rank 0: {target}.partial/part-0.safetensors: the model cannot be written: "), first
    assert "File too large" in first and first.endswith("; make room there, or name another directory")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert [(path.name, path.read_bytes()) for path in target.iterdir()] == [("model.safetensors", b"the last good one")]


def _damaged(source: str, target: Path, damage) -> str:
    """A copy of `source` whose tensors went through `damage`."""
    target.mkdir()
    (target / "config.json").write_text((Path(source) / "config.json").read_text())
    save_file(damage(tensors_in(source)), target / "model.safetensors")
    return str(target)


def test_a_missing_tensor_is_named(ranks: RankPool, language_model, tmp_path) -> None:
    missing = "model.layers.2.mlp.up_proj.weight"
    directory = _damaged(language_model("qwen2"), tmp_path / "x", lambda t: {n: v for n, v in t.items() if n != missing})
    (error,) = ranks.run("models.on_ranks:load_error", directory=directory)
    assert error.startswith("ConfigError: actor.path") and missing in error and directory in error


@pytest.mark.parametrize("rows", [96, 104, 128])
def test_a_tensor_of_another_size_is_named(ranks: RankPool, language_model, tmp_path, rows: int) -> None:
    """An embedding with fewer rows than config.json says, or more, belongs to another model."""
    name = "model.embed_tokens.weight"

    def resize(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**tensors, name: torch.zeros(rows, tensors[name].size(1))}

    (error,) = ranks.run("models.on_ranks:load_error", directory=_damaged(language_model("llama"), tmp_path / "x", resize))
    assert error.startswith("ConfigError: actor.path") and name in error and f"({rows}, 32)" in error and "(101, 32)" in error


def test_a_classifier_of_several_labels_is_refused(ranks: RankPool, tmp_path) -> None:
    directory = save_model(tiny_value_model("llama"), tmp_path / "good")
    two = _damaged(directory, tmp_path / "x", lambda tensors: {**tensors, "score.weight": torch.zeros(2, 32)})
    (error,) = ranks.run("models.on_ranks:load_error", directory=two, head="value")
    assert error.startswith("ConfigError: critic.path") and "score.weight" in error and "(2, 32)" in error


def test_a_directory_without_safetensors_is_refused(ranks: RankPool, language_model, tmp_path) -> None:
    (tmp_path / "config.json").write_text((Path(language_model("llama")) / "config.json").read_text())
    (error,) = ranks.run("models.on_ranks:load_error", directory=str(tmp_path))
    assert error.startswith("ConfigError: actor.path") and "model.safetensors" in error

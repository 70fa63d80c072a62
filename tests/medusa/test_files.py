"""Directories of draft heads: written as vLLM reads them, read to the same bits, and refused where they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_mc.config import ConfigError, Medusa
from rlhf_mc.medusa.files import check_heads, load_heads, save_heads, write_heads_config
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.models.whole_directory import SaveError

MODEL = ModelShape("llama", 4, 16, 4, 2, 4, 24, 101, 1e-6, True, False, False, {}, None, 256, False)
OUTPUT = torch.arange(101.0 * 16).view(101, 16)
SHARED, OWN = Medusa(num_heads=2), Medusa(num_heads=3, num_layers=2, shared_output=False)


def heads(shape: HeadsShape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(dims, generator=generator).bfloat16() for name, dims in shape.tensors().items()}


def saved(directory: Path, settings: Medusa) -> Path:
    shape = HeadsShape.of(settings, MODEL)
    save_heads(directory, shape, MODEL, heads(shape).items(), OUTPUT if settings.shared_output else None, writes=True)
    return directory


def change_config(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("settings", [SHARED, OWN], ids=["shared output", "own outputs"])
def test_saved_heads_load_to_the_same_bits(tmp_path, settings):
    directory, shape = saved(tmp_path / "new" / "heads", settings), HeadsShape.of(settings, MODEL)
    check_heads(directory, settings, MODEL)
    loaded = load_heads(directory, shape)
    assert list(loaded) == list(shape.tensors())
    for name, tensor in heads(shape).items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)
    outputs = {name: tensor for name, tensor in load_file(directory / "model.safetensors").items() if name not in loaded}
    assert list(outputs) == (["lm_heads.0.weight"] if settings is SHARED else []), "what vLLM's own loader needs beside"
    assert all(torch.equal(tensor, OUTPUT) for tensor in outputs.values())
    assert sorted(file.name for file in directory.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in directory.parent.iterdir()] == ["heads"]


def test_every_rank_takes_every_tensor_and_one_writes(tmp_path):
    shape, taken = HeadsShape.of(SHARED, MODEL), []

    def collective() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in heads(shape).items():
            taken.append(name)
            yield name, tensor

    save_heads(tmp_path / "heads", shape, MODEL, collective(), None, writes=False)
    assert taken == list(shape.tensors()) and not list(tmp_path.iterdir())


def test_tensors_that_are_good_until_the_next_is_taken_are_kept(tmp_path):
    shape, buffer = HeadsShape.of(SHARED, MODEL), torch.zeros(16, 16)

    def reused() -> Iterator[tuple[str, Tensor]]:
        for number, name in enumerate(shape.tensors()):
            yield name, buffer.fill_(number)

    save_heads(tmp_path / "heads", shape, MODEL, reused(), OUTPUT, writes=True)
    assert [tensor[0, 0].item() for tensor in load_heads(tmp_path / "heads", shape).values()] == [0, 1]


def test_a_failure_while_saving_leaves_the_old_heads(tmp_path):
    directory, shape = saved(tmp_path / "heads", SHARED), HeadsShape.of(SHARED, MODEL)

    def breaking() -> Iterator[tuple[str, Tensor]]:
        yield shape.block_names[0], torch.zeros(16, 16)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        save_heads(directory, shape, MODEL, breaking(), OUTPUT, writes=True)
    check_heads(directory, SHARED, MODEL)
    assert load_heads(directory, shape)[shape.block_names[0]].any()


def test_where_nothing_can_be_written_the_file_is_named(tmp_path):
    shape = HeadsShape.of(SHARED, MODEL)
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match="file/heads.partial: the model cannot be written: Not a directory; make room there"):
        save_heads(tmp_path / "file" / "heads", shape, MODEL, heads(shape).items(), OUTPUT, writes=True)


@pytest.mark.parametrize("settings", [SHARED, OWN], ids=["shared output", "own outputs"])
def test_vllm_reads_the_config(tmp_path, settings):
    """vLLM renames top-level keys that it takes for its own; the model's layers must not be among them."""
    from vllm.transformers_utils.configs.medusa import MedusaConfig

    write_heads_config(tmp_path / "heads", HeadsShape.of(settings, MODEL), MODEL)
    config = MedusaConfig.from_pretrained(tmp_path / "heads")
    assert (config.num_heads, config.num_hidden_layers) == (settings.num_heads, settings.num_layers)
    assert (config.hidden_size, config.vocab_size, config.truncated_vocab_size) == (16, 101, 101)
    assert config.original_lm_head == settings.shared_output and config.architectures == ["MedusaModel"]


def test_heads_from_elsewhere_pass_by_their_sizes(tmp_path):
    directory = saved(tmp_path / "heads", OWN)
    change_config(directory, lambda config: [config.pop(name) for name in ("trained_on", "original_lm_head", "truncated_vocab_size")])
    check_heads(directory, OWN, MODEL)


@pytest.mark.parametrize(
    "settings, model, message",
    [
        (SHARED, replace(MODEL, hidden=32), r"medusa\.path: '.*' has hidden_size 16, the model needs 32; name heads that were trained"),
        (SHARED, replace(MODEL, vocab=99), r"medusa\.path: '.*' has vocab_size 101, the model needs 99; name heads"),
        (SHARED, replace(MODEL, family="qwen3"), r"medusa\.path: '.*' was trained on .*'llama'.*, the model is .*'qwen3'.*; name heads"),
        (SHARED, replace(MODEL, num_layers=6), r"medusa\.path: '.*' was trained on .*4.*, the model is .*6.*; name heads"),
        (replace(SHARED, num_heads=3), MODEL, r"medusa\.num_heads: 3, but the heads in .* were made with 2; set medusa\.num_heads=2, or"),
        (replace(SHARED, num_layers=2), MODEL, r"medusa\.num_layers: 2, but .* with 1; set medusa\.num_layers=1, or name other heads"),
        (replace(SHARED, shared_output=False), MODEL, r"medusa\.shared_output: false, but .* true; set medusa\.shared_output=true, or"),
    ],
)
def test_heads_that_do_not_fit_are_refused(tmp_path, settings, model, message):
    directory = saved(tmp_path / "heads", SHARED)
    with pytest.raises(ConfigError, match=message):
        check_heads(directory, settings, model)


@pytest.mark.parametrize("name, tensor, message", [
    ("blocks.1.layers.0.weight", None, r"blocks\.1\.layers\.0\.weight is missing, but \(16, 16\) is needed"),
    ("blocks.1.layers.0.weight", torch.zeros(16, 8), r"has the shape \(16, 8\), but \(16, 16\) is needed"),
    ("blocks.1.layers.0.bias", torch.zeros(16), r"blocks\.1\.layers\.0\.bias has the shape \(16,\), but there is no such tensor"),
])  # fmt: skip
def test_other_tensors_than_the_config_says_are_refused(tmp_path, name, tensor, message):
    file = saved(tmp_path / "heads", SHARED) / "model.safetensors"
    tensors = {other: held for other, held in load_file(file).items() if other != name}
    save_file(tensors if tensor is None else {**tensors, name: tensor}, file)
    with pytest.raises(ConfigError, match=rf"^medusa\.path: .*{message}"):
        check_heads(tmp_path / "heads", SHARED, MODEL)


def test_what_is_not_there_or_damaged_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"medusa\.path: no heads at '.*nowhere' \(no config\.json there\); name a directory"):
        check_heads(tmp_path / "nowhere", SHARED, MODEL)
    directory = saved(tmp_path / "heads", SHARED)
    (directory / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(ConfigError, match=r"medusa\.path: .*model\.safetensors cannot be read: .*; save the heads again"):
        check_heads(directory, SHARED, MODEL)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        check_heads(directory, SHARED, MODEL)
    change_config(directory, lambda config: config.update(model_type="llama"))
    with pytest.raises(ConfigError, match=r"holds a model of type llama, not medusa; name a directory of draft heads"):
        check_heads(directory, SHARED, MODEL)
    for damaged in ("{", "[1]"):
        (directory / "config.json").write_text(damaged)
        with pytest.raises(ConfigError, match=r"config\.json is damaged: .*; save the heads again"):
            check_heads(directory, SHARED, MODEL)

"""A directory of draft heads, in the form that vLLM's method medusa reads: config.json, and all tensors in one model.safetensors.

config.json also says on which model they were trained: heads read its last hidden states, which mean nothing to another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_mc.config import ConfigError, Medusa
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.models.whole_directory import naming, whole_directory

_CONFIG, _TENSORS = "config.json", "model.safetensors"
_SHARED_OUTPUT = "lm_heads.0.weight"  # vLLM's name for the output layer of all heads
_OTHER_HEADS = "name heads that were trained on this model; null: new ones"


def _config(shape: HeadsShape, model: ModelShape) -> dict[str, Any]:
    """What config.json says. vLLM takes every key with "num" and "heads" or "layers" for its own, so the model's are a level deeper."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocab,
        "truncated_vocab_size": shape.vocab,
        "num_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "original_lm_head": shape.shared_output,
        "trained_on": {"family": model.family, "num_layers": model.num_layers},
    }


def write_heads_config(directory: str | Path, shape: HeadsShape, model: ModelShape) -> None:
    """DIRECTORY/config.json of heads on `model`. The directory is made where there is none."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    Path(directory, _CONFIG).write_text(json.dumps(_config(shape, model), indent=2))


def save_heads(
    directory: str | Path,
    shape: HeadsShape,
    model: ModelShape,
    tensors: Iterable[tuple[str, Tensor]],
    output_layer: Tensor | None,
    writes: bool,
) -> None:
    """Takes all `tensors` (a collective: name, whole tensor) and, where `writes`, makes a directory of heads.

    output_layer: [vocab, hidden] of the model, where the heads share it: vLLM reads a copy of it with them. Not needed elsewhere than
    on the rank that writes. The directory is whole or not there. Raises SaveError where the disk is full or refuses.
    """
    on_host: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if writes:
            on_host[name] = tensor.to("cpu", copy=True).contiguous()
    if not writes:
        return
    if shape.shared_output:
        on_host[_SHARED_OUTPUT] = output_layer
    with whole_directory(Path(directory)) as aside:
        write_heads_config(aside, shape, model)
        with naming(aside / _TENSORS):
            save_file(on_host, aside / _TENSORS, metadata={"format": "pt"})


def load_heads(directory: str | Path, shape: HeadsShape) -> dict[str, Tensor]:
    """name -> whole tensor on the host, in the precision of the file; without a copy of a shared output layer. `check_heads` has passed."""
    with safe_open(Path(directory, _TENSORS), framework="pt") as file:
        return {name: file.get_tensor(name) for name in shape.tensors()}


def check_heads(directory: str | Path, settings: Medusa, model: ModelShape, key: str = "medusa.path") -> None:
    """Raises ConfigError where the heads in `directory` are not those that `settings` ask for, or not of a model like `model`.

    Reads config.json, and the header of the tensors. Heads made elsewhere, without "trained_on", are taken on trust if their
    sizes fit. key: the setting that named the directory; the other settings of the heads are its neighbours.
    """
    path = Path(directory)
    shape = HeadsShape.of(settings, model)
    _check_config(path, _read_config(path, key), _config(shape, model), key)
    _check_tensors(path, shape, key)


def _read_config(path: Path, key: str) -> dict[str, Any]:
    """config.json, with vLLM's defaults for what it leaves out."""
    if not (path / _CONFIG).is_file():
        raise ConfigError(f"{key}: no heads at '{path}' (no {_CONFIG} there); name a directory of trained heads; null: new ones")
    try:
        config = dict(json.loads((path / _CONFIG).read_text()))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key}: {path / _CONFIG} is damaged: {error}; save the heads again") from None
    return {"truncated_vocab_size": config.get("vocab_size"), "original_lm_head": False, **config}


def _check_config(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any], key: str) -> None:
    if found.get("model_type") != expected["model_type"]:
        raise ConfigError(f"{key}: '{path}' holds a model of type {found.get('model_type')}, not medusa; name a directory of draft heads")
    for name in ("hidden_size", "vocab_size", "truncated_vocab_size"):
        if found.get(name) != expected[name]:
            raise ConfigError(f"{key}: '{path}' has {name} {found.get(name)}, the model needs {expected[name]}; {_OTHER_HEADS}")
    trained_on = found.get("trained_on", expected["trained_on"])
    if trained_on != expected["trained_on"]:
        raise ConfigError(f"{key}: '{path}' was trained on {trained_on}, the model is {expected['trained_on']}; {_OTHER_HEADS}")
    section = key.rpartition(".")[0]
    for name, setting in (("num_heads", "num_heads"), ("num_hidden_layers", "num_layers"), ("original_lm_head", "shared_output")):
        if found.get(name) != expected[name]:
            theirs, ours = json.dumps(found.get(name)), json.dumps(expected[name])
            fix = f"set {section}.{setting}={theirs}, or name other heads in {key}"
            raise ConfigError(f"{section}.{setting}: {ours}, but the heads in '{path}' were made with {theirs}; {fix}")


def _check_tensors(path: Path, shape: HeadsShape, key: str) -> None:
    try:
        with safe_open(path / _TENSORS, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
            if shape.shared_output:
                found.pop(_SHARED_OUTPUT, None)  # the actor's own is used
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{key}: {path / _TENSORS} cannot be read: {error}; save the heads again") from None
    expected = shape.tensors()
    for name in (*expected, *found):
        if found.get(name) != expected.get(name):
            there = f"has the shape {found[name]}" if name in found else "is missing"
            needed = f"{expected[name]} is needed" if name in expected else "there is no such tensor in these heads"
            raise ConfigError(f"{key}: {path / _TENSORS}: {name} {there}, but {needed}; its {_CONFIG} is not of the same heads")

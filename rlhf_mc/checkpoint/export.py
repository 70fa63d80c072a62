"""A model of a checkpoint, put together from the files of all ranks as a Hugging Face directory. No collective, and one process will do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_mc.checkpoint.layout import Layout, heads_pieces, model_pieces
from rlhf_mc.checkpoint.relayout import SavedShards
from rlhf_mc.checkpoint.snapshot import DamagedError, fault_of, read_manifest, read_record
from rlhf_mc.config import ConfigError, Medusa
from rlhf_mc.medusa.files import save_heads
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.hf_config import ModelShape, read_shape
from rlhf_mc.models.hf_weights import save_hf_directory
from rlhf_mc.models.precision import DTYPES
from rlhf_mc.models.role import Role
from rlhf_mc.models.weight_layout import hf_shapes

_SCORE = "score.weight"


def export(checkpoint: Path, target: Path, role: Role, source: str | None = None) -> None:
    """Writes the directory `target`, in the precision of the run. Memory: some whole tensors in float32, and 4 GiB of the file.

    Raises DamagedError where a file of the role is not what was saved, ConfigError where there is none, or no such `source`.
    """
    record = read_record(checkpoint)
    _check_files(checkpoint, role)
    settings = record["settings"]
    if role is Role.MEDUSA:
        _export_heads(checkpoint, target, record, source)
        return
    value_head = role is Role.CRITIC
    named = settings["critic"]["path"] or settings["reward_model"]["path"] if value_head else settings["actor"]["path"]
    directory = source or named
    shape = read_shape(directory, f"the model that {role.value} started from (--source, where it has moved)")
    tensors = _tensors(checkpoint, role, shape, record)
    save_hf_directory(tensors, directory, str(target), value_head, DTYPES[settings["trainer"]["dtype"]], writes=True)


def _export_heads(checkpoint: Path, target: Path, record: dict[str, Any], source: str | None) -> None:
    model = read_shape(source or record["settings"]["actor"]["path"], "the model that the actor started from (--source, where it has moved)")
    dtype = DTYPES[record["settings"]["trainer"]["dtype"]]
    shape = HeadsShape.of(Medusa(**record["settings"]["medusa"]), model)
    shards = SavedShards(checkpoint, Role.MEDUSA, partial(heads_pieces, shape), Layout(**record["layout"]))
    output = None
    if shape.shared_output:
        name = "model.embed_tokens.weight" if model.tied else "lm_head.weight"
        output = dict(_tensors(checkpoint, Role.ACTOR, model, record, [name]))[name]
    tensors = ((name, shards.whole(name, dims).to(dtype)) for name, dims in shape.tensors().items())
    save_heads(target, shape, model, tensors, output, writes=True)


def _tensors(
    checkpoint: Path, role: Role, shape: ModelShape, record: dict[str, Any], names: Sequence[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor), as the run itself would export them: params are their fp32 main params, rounded."""
    value_head = role is Role.CRITIC
    dtype = DTYPES[record["settings"]["trainer"]["dtype"]]
    shards = SavedShards(checkpoint, role, partial(model_pieces, shape, value_head), Layout(**record["layout"]))
    for name, dims in hf_shapes(shape, value_head).items():
        if names is None or name in names:
            whole = shards.whole(name, dims)
            yield name, whole if name == _SCORE else whole.to(dtype)


def _check_files(checkpoint: Path, role: Role) -> None:
    files = [file for file in read_manifest(checkpoint) if file.name.endswith(f".{role.value}.safetensors") or file.name == "run.json"]
    if len(files) < 2:
        raise ConfigError(f"{checkpoint}: it holds no {role.value}; the run did not train one")
    for file in files:
        if fault := fault_of(checkpoint, file):
            raise DamagedError(fault)

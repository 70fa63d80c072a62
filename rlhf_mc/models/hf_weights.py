"""Weights from a Hugging Face directory into a rank's shard, and from all shards back into whole Hugging Face tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_mc.config import ConfigError
from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.models.weight_layout import OUTPUT, Shard, hf_shapes, pieces_of
from rlhf_mc.models.whole_directory import SaveError, naming, whole_directory
from rlhf_mc.parallel.reshard import Piece, Shapes
from rlhf_mc.parallel.world import World

_BUCKET_BYTES = 64 << 20
_FILE_BYTES = 4 << 30

# For each rank of the model group, in its order, the pieces that it exports, by the whole tensor's name.
Owned = list[dict[str, list[Piece]]]


class _Checkpoint:
    """The safetensors files of a directory, read slice by slice. Raises ConfigError for what is missing."""

    def __init__(self, directory: Path, key: str) -> None:
        self.directory, self.key = directory, key
        self.files = self._index()
        self._open = ExitStack()
        self._handles: dict[str, safe_open] = {}

    def _index(self) -> dict[str, str]:
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            return json.loads(index.read_text())["weight_map"]
        single = self.directory / "model.safetensors"
        if not single.is_file():
            raise ConfigError(
                f"{self.key}: '{self.directory}' has no model.safetensors (nor an index of shards); "
                "save the model with safe serialization"
            )
        with safe_open(single, framework="pt") as handle:
            return {name: single.name for name in handle.keys()}

    def __enter__(self) -> _Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def read(self, piece: Piece, dims: tuple[int, ...]) -> Tensor:
        """The piece's rows or columns, on the host. `dims`: the shape that the whole tensor must have."""
        file = self.files.get(piece.name)
        if file is None:
            raise ConfigError(f"{self.key}: '{self.directory}' lacks the tensor {piece.name}")
        if file not in self._handles:
            self._handles[file] = self._open.enter_context(safe_open(self.directory / file, framework="pt"))
        tensor = self._handles[file].get_slice(piece.name)
        if tuple(tensor.get_shape()) != dims:
            raise ConfigError(
                f"{self.key}: {piece.name} in '{self.directory}' has shape {tuple(tensor.get_shape())}, "
                f"but its config.json implies {dims}; weights and config are not of the same model"
            )
        end = piece.whole_start + piece.length
        return tensor[piece.whole_start : end] if piece.dim == 0 else tensor[:, piece.whole_start : end]


def load_hf_weights(params: dict[str, Tensor], shape: ModelShape, shard: Shard, directory: str, key: str) -> None:
    """Fills every parameter of this rank's shard, by name, from `directory`. Padded vocabulary rows become zero.

    A value head that the directory does not have starts at zero: its values are then 0 until it is trained.
    Raises ConfigError naming `key` where the directory does not fit.
    """
    shapes = hf_shapes(shape, shard.value_head)
    with _Checkpoint(Path(directory), key) as checkpoint, torch.no_grad():
        for param in params.values():
            param.zero_()
        for piece in pieces_of(shape, shard):
            if piece.name == "score.weight" and piece.name not in checkpoint.files:
                continue
            target = params[piece.param]
            target.narrow(piece.dim, piece.start, piece.length).copy_(checkpoint.read(piece, shapes[piece.name]))


def read_output_layer(directory: str | Path, shape: ModelShape, key: str = "model") -> Tensor:
    """[vocab, hidden] on the host: the output layer of the language model in `directory`, which may be its embedding."""
    name = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    with _Checkpoint(Path(directory), key) as checkpoint:
        return checkpoint.read(Piece(name, name, 0, 0, 0, shape.vocab), (shape.vocab, shape.hidden))


def _buckets(shapes: Shapes, element_bytes: int) -> Iterator[list[str]]:
    bucket: list[str] = []
    size = 0
    for name, dims in shapes.items():
        num_bytes = element_bytes * torch.Size(dims).numel()
        if bucket and size + num_bytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += num_bytes
    yield bucket


def _local(params: dict[str, Tensor], piece: Piece) -> Tensor:
    return params[piece.param].detach().narrow(piece.dim, piece.start, piece.length)


def _size(piece: Piece, dims: tuple[int, ...]) -> torch.Size:
    return torch.Size(tuple(piece.length if d == piece.dim else n for d, n in enumerate(dims)))


def _gather_bucket(
    names: list[str], shapes: Shapes, params: dict[str, Tensor], owned: Owned, dtype: torch.dtype, world: World
) -> dict[str, Tensor]:
    """Collective over the model group. Whole tensors of one bucket, from what each rank of the group owns of them."""
    sizes = [sum(_size(p, shapes[n]).numel() for n in names for p in pieces.get(n, ())) for pieces in owned]
    mine = torch.zeros(max(sizes), dtype=dtype, device=world.device)
    place = 0
    for name in names:
        for piece in owned[world.model_group.rank()].get(name, ()):
            flat = _local(params, piece).reshape(-1)
            mine[place : place + flat.numel()].copy_(flat)
            place += flat.numel()
    everyone = torch.empty(len(owned) * mine.numel(), dtype=dtype, device=world.device)
    dist.all_gather_into_tensor(everyone, mine, group=world.model_group)
    everyone = everyone.view(len(owned), -1)
    whole = {name: torch.empty(shapes[name], dtype=dtype, device=world.device) for name in names}
    for rank, pieces in enumerate(owned):
        place = 0
        for name in names:
            for piece in pieces.get(name, ()):
                size = _size(piece, shapes[name])
                part = everyone[rank, place : place + size.numel()].view(size)
                whole[name].narrow(piece.dim, piece.whole_start, piece.length).copy_(part)
                place += size.numel()
    return whole


def gather_tensors(
    shapes: Shapes, params: dict[str, Tensor], owned: Owned, dtype: torch.dtype, world: World
) -> Iterator[tuple[str, Tensor]]:
    """Collective over the model group: every rank must take every item. (name, whole tensor on the device), in the order of `shapes`.

    params: this rank's shards, by the pieces' `param`; may lack what the rank does not own.  dtype: of all of them.
    The tensors are good until the next item is taken.
    """
    for names in _buckets(shapes, dtype.itemsize):
        yield from _gather_bucket(names, shapes, params, owned, dtype, world).items()


def _owned_pieces(shape: ModelShape, world: World, value_head: bool) -> Owned:
    """For each rank of the model group, in its order, the pieces that it exports, by Hugging Face name.

    A tensor that is whole on every tensor rank (norms, value head) is exported by tensor rank 0 only.
    """
    grid, shapes = world.grid, hf_shapes(shape, value_head)
    owned = []
    for rank in grid.model_ranks():
        place = replace(grid, rank=rank)
        by_name: dict[str, list[Piece]] = {}
        for piece in pieces_of(shape, Shard.of(shape, place, value_head)):
            whole = piece.length == shapes[piece.name][piece.dim]
            if piece.owner and (place.tensor_rank == 0 or not whole):
                by_name.setdefault(piece.name, []).append(piece)
        owned.append(by_name)
    return owned


def export_hf_weights(params: dict[str, Tensor], shape: ModelShape, world: World, value_head: bool) -> Iterator[tuple[str, Tensor]]:
    """Collective over the model group: every rank must take every item. (name, whole tensor on the device), in checkpoint order.

    params: of this rank's shard, by name.  The tensors are in the model's precision; a value head is in fp32. They are good
    until the next item is taken.
    """
    shapes = hf_shapes(shape, value_head)
    owned = _owned_pieces(shape, world, value_head)
    head = {"score.weight": shapes.pop("score.weight")} if value_head else {}
    body_dtype = next(param.dtype for name, param in params.items() if not (value_head and name == OUTPUT))
    yield from gather_tensors(shapes, params, owned, body_dtype, world)
    if head:
        yield from gather_tensors(head, params, owned, torch.float32, world)


def save_hf_directory(
    tensors: Iterator[tuple[str, Tensor]], source: str, target: str, value_head: bool, dtype: torch.dtype, writes: bool
) -> None:
    """Takes all `tensors` (a collective) and, where `writes`, makes a Hugging Face directory at `target`.

    config.json, tokenizer and the rest come from `source`; files hold at most 4 GiB. `target` is whole or not there. Raises SaveError
    where the disk is full or refuses, after all `tensors` were taken.
    """
    if not writes:
        _take_all(tensors)
        return
    try:
        with whole_directory(Path(target)) as aside:
            weight_map = _write_parts(tensors, aside)
            _name_files(aside, weight_map)
            _copy_companions(Path(source), aside, value_head, dtype)
    except SaveError:
        _take_all(tensors)
        raise


def _take_all(tensors: Iterator[tuple[str, Tensor]]) -> None:
    for _ in tensors:
        pass


def _write_parts(tensors: Iterator[tuple[str, Tensor]], aside: Path) -> dict[str, int]:
    """Writes part-0, part-1, ... into `aside`; tensor's name -> number of its part."""
    weight_map: dict[str, int] = {}
    part: dict[str, Tensor] = {}
    number = 0
    for name, tensor in tensors:
        if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > _FILE_BYTES:
            _write_part(part, aside, number)
            part, number = {}, number + 1
        part[name] = tensor.to("cpu", copy=True).contiguous()
        weight_map[name] = number
    _write_part(part, aside, number)
    return weight_map


def _write_part(part: dict[str, Tensor], aside: Path, number: int) -> None:
    path = aside / f"part-{number}.safetensors"
    with naming(path):
        save_file(part, path, metadata={"format": "pt"})


def _name_files(directory: Path, weight_map: dict[str, int]) -> None:
    """Gives the parts the names that transformers expects, with an index where there are several."""
    count = max(weight_map.values()) + 1
    if count == 1:
        (directory / "part-0.safetensors").rename(directory / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for i, name in enumerate(names):
        (directory / f"part-{i}.safetensors").rename(directory / name)
    size = sum((directory / name).stat().st_size for name in names)
    index = {"metadata": {"total_size": size}, "weight_map": {name: names[i] for name, i in weight_map.items()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _copy_companions(source: Path, target: Path, value_head: bool, dtype: torch.dtype) -> None:
    """config.json, adjusted to the head and the precision, and every other small file (tokenizer, generation config)."""
    for file in source.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.suffix not in (".bin", ".pt", ".pth", ".gguf"):
            shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    stem = config["architectures"][0].removesuffix("ForCausalLM").removesuffix("ForSequenceClassification")
    config["architectures"] = [stem + ("ForSequenceClassification" if value_head else "ForCausalLM")]
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if value_head:
        config["num_labels"] = 1
        config["id2label"], config["label2id"] = {"0": "score"}, {"score": 0}
    (target / "config.json").write_text(json.dumps(config, indent=2))

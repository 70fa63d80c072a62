"""Reading a role on another layout than it was saved on: by the pieces of whole tensors that ranks hold, then and now."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rlhf_mc.checkpoint.layout import Layout, shard_pieces
from rlhf_mc.models.role import Resident, Role
from rlhf_mc.models.stepped import Stepped
from rlhf_mc.parallel.grids import TrainingGrid
from rlhf_mc.parallel.reshard import Piece

SHARDS = "shards"
#: Whole shards of parameters that are kept while the pieces of one parameter are looked for in them.
_KEPT = 4


def file_name(role: Role, rank: int) -> str:
    """Where a rank's part of a role is."""
    return f"rank{rank:05d}.{role.value}.safetensors"


def describe(shards: list[Stepped]) -> dict[str, str]:
    """What a file must say of its tensors beside their values: which elements of which shape they are."""
    return {SHARDS: json.dumps({shard.name: {"start": shard.start, "shape": shard.shape} for shard in shards})}


class SavedShards:
    """The shards of parameters of one role as they were on the ranks that saved it, put together from the files of these."""

    def __init__(self, directory: Path, role: Role, pieces: Callable[[TrainingGrid], list[Piece]], saved: Layout) -> None:
        """pieces: what a rank in that place holds of the role, by the names of whole tensors."""
        self._directory, self._role = directory, role
        self._ranks = list(saved.copies())
        self._pieces: dict[str, list[tuple[int, Piece]]] = {}
        for number, ranks in enumerate(self._ranks):
            for piece in pieces(saved.grid(ranks[0])):
                self._pieces.setdefault(piece.name, []).append((number, piece))
        self.shard = lru_cache(maxsize=_KEPT)(self._shard)

    def sources(self, piece: Piece) -> list[tuple[int, Piece]]:
        """(number of the shard, its piece) of all that hold something of the same whole tensor."""
        return self._pieces[piece.name]

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A whole tensor of this shape, float32, as it was when it was saved."""
        tensor = torch.empty(shape)
        for number, piece in self._pieces[name]:
            if piece.owner:
                held = self.shard(number, piece.param, "main").narrow(piece.dim, piece.start, piece.length)
                tensor.narrow(piece.dim, piece.whole_start, piece.length).copy_(held)
        return tensor

    def _shard(self, number: int, name: str, kind: str) -> Tensor:
        """A whole shard of one parameter, as the ranks of this number had it; kind: main, exp_avg or exp_avg_sq."""
        parts = list(self._parts(number, name, kind))
        shape = parts[0][1]["shape"]
        flat = torch.empty(prod(shape))
        for values, place in parts:
            flat[place["start"] : place["start"] + values.numel()] = values.reshape(-1)
        return flat.view(shape)

    def scalar(self, kind: str) -> Tensor:
        """A number that is the same for all parameters: how often all of them were stepped."""
        number, piece = next(iter(self._pieces.values()))[0]
        return next(self._parts(number, piece.param, kind))[0]

    def _parts(self, number: int, name: str, kind: str) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """(values, their place in the shard) of each rank that has a part of it."""
        for rank in self._ranks[number]:
            path = self._directory / file_name(self._role, rank)
            if not path.exists():  # it has nothing of the role
                continue
            with safe_open(path, framework="pt") as file:
                place = json.loads(file.metadata()[SHARDS]).get(name)
                if place is not None:
                    yield file.get_tensor(f"{name}:{kind}"), place


def values_for(model: Resident, directory: Path, saved: Layout) -> Callable[[Stepped, str], Tensor]:
    """What a shard's tensor of each kind must become on this rank: values(shard, kind), shaped as there. No collective."""
    shards = SavedShards(directory, model.role, partial(shard_pieces, model), saved)
    mine: dict[str, list[Piece]] = {}
    for piece in shard_pieces(model, model.world.grid):
        mine.setdefault(piece.param, []).append(piece)
    return partial(_values, shards, mine)


def _values(shards: SavedShards, mine: dict[str, list[Piece]], wanted: Stepped, kind: str) -> Tensor:
    target = wanted.tensor(kind)
    if not target.dim():
        return shards.scalar(kind)
    whole = torch.zeros(wanted.shape)  # rows that pad the vocabulary are in no piece, and are zero
    for piece in mine.get(wanted.name, []):
        for number, source in shards.sources(piece):
            _copy_overlap(whole, piece, source, lambda: shards.shard(number, source.param, kind))
    return whole.reshape(-1)[wanted.start : wanted.start + target.numel()].view(target.shape)


def _copy_overlap(whole: Tensor, piece: Piece, source: Piece, held: Callable[[], Tensor]) -> None:
    """Copies into `whole`, at `piece`, what the two pieces of one tensor have in common. held: the parameter that `source` lies in."""
    start = max(piece.whole_start, source.whole_start)
    length = min(piece.whole_end, source.whole_end) - start
    if length > 0:
        values = held().narrow(source.dim, source.start + start - source.whole_start, length)
        whole.narrow(piece.dim, piece.start + start - piece.whole_start, length).copy_(values)

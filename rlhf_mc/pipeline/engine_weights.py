"""Blocks of weights into an engine's model: in place where its weights lie as the plan thinks, else through its reload.

Knows the shape of the engine's shard, not vLLM itself, which is in vllm_parts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Protocol

import torch
from torch import Tensor

from rlhf_mc.parallel.exchange import Places
from rlhf_mc.parallel.reshard import Block, Piece, Shapes

_EMBEDDING = "model.embed_tokens.weight"


class WeightWriter(Places, Protocol):
    """Takes one update of all weights: start, then places that are filled, then finish."""

    def start(self) -> None:
        """Before the first block."""

    def finish(self) -> None:
        """After the last block; the weights are in use from here on."""


class InPlaceWriter:
    """Each block goes straight to where the model computes from. Rows that belong to no piece (padding) become zero."""

    def __init__(self, params: Mapping[str, Tensor], pieces: Iterable[Piece]) -> None:
        self._params = params
        self._padding = list(_padding(params, pieces))

    @staticmethod
    def fits(params: Mapping[str, Tensor], pieces: Iterable[Piece]) -> bool:
        """Whether every piece has its place in `params`; it has none where the model repacked a weight after loading."""
        return all(
            piece.param in params
            and params[piece.param].dim() > piece.dim
            and params[piece.param].shape[piece.dim] >= piece.start + piece.length
            for piece in pieces
        )

    def start(self) -> None:
        """Nothing to prepare."""

    def places(self, blocks: Sequence[Block]) -> Sequence[Tensor]:
        """Places in the model's own weights."""
        return [self._params[b.target_param].detach().narrow(b.dim, b.target_start, b.length) for b in blocks]

    def filled(self, blocks: Sequence[Block]) -> None:
        """Nothing to do: they are in use."""

    @torch.no_grad()
    def finish(self) -> None:
        """Clears the padding, which is garbage after the engine slept."""
        for rows in self._padding:
            rows.zero_()


def _padding(params: Mapping[str, Tensor], pieces: Iterable[Piece]) -> Iterable[Tensor]:
    """Rows at the end of each weight that no piece covers."""
    ends: dict[str, tuple[int, int]] = {}
    for piece in pieces:
        _, end = ends.get(piece.param, (piece.dim, 0))
        ends[piece.param] = piece.dim, max(end, piece.start + piece.length)
    for name, (dim, end) in ends.items():
        size = params[name].shape[dim]
        if end < size:
            yield params[name].narrow(dim, end, size - end)


class ReloadWriter:
    """Gathers the blocks of each Hugging Face tensor and hands it to the model's own reload.

    A tensor has its whole shape, of which only this rank's rows are filled: the model's loader takes those and no others, and
    on CPU, the only device where a model repacks, memory that nobody touched costs nothing.
    load: takes (name, tensor) pairs between `begin` and `end`.  tied: the output layer gets the embedding as well, since a
    model that repacks has a packed copy there.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        shapes: Shapes,
        tied: bool,
        dtype: torch.dtype,
        begin: Callable[[], None],
        load: Callable[[list[tuple[str, Tensor]]], object],
        end: Callable[[], None],
    ) -> None:
        self._shapes, self._tied, self._dtype = shapes, tied, dtype
        self._begin, self._load, self._end = begin, load, end
        self._due: dict[str, int] = {}
        for piece in pieces:
            self._due[piece.name] = self._due.get(piece.name, 0) + piece.numel(shapes[piece.name])
        self._missing: dict[str, int] = {}
        self._partial: dict[str, Tensor] = {}

    def start(self) -> None:
        """Opens the reload."""
        self._missing, self._partial = dict(self._due), {}
        self._begin()

    def places(self, blocks: Sequence[Block]) -> Sequence[Tensor]:
        """Places in tensors of whole shape."""
        return [self._whole(b.name).narrow(b.dim, b.whole_start, b.length) for b in blocks]

    def _whole(self, name: str) -> Tensor:
        if name not in self._partial:
            self._partial[name] = torch.empty(self._shapes[name], dtype=self._dtype)
        return self._partial[name]

    def filled(self, blocks: Sequence[Block]) -> None:
        """Tensors that are complete now go to the model, which keeps them until it has all of a layer."""
        for block in blocks:
            self._missing[block.name] -= block.numel
        for name in {block.name: None for block in blocks if self._missing[block.name] == 0}:
            self._hand_on(name)

    def _hand_on(self, name: str) -> None:
        tensor = self._partial.pop(name)
        self._load([(name, tensor)])
        if self._tied and name == _EMBEDDING:
            self._load([("lm_head.weight", tensor)])

    def finish(self) -> None:
        """Closes the reload."""
        self._end()


class TwoWriters:
    """Two models' weights in one update: blocks of `second_names` go to the second writer, the others to the first."""

    def __init__(self, first: WeightWriter, second: WeightWriter, second_names: Set[str]) -> None:
        self.first, self._second, self._second_names = first, second, second_names

    def start(self) -> None:
        """Opens both."""
        self.first.start()
        self._second.start()

    def places(self, blocks: Sequence[Block]) -> Sequence[Tensor]:
        """In the order of the blocks, though each writer is asked once."""
        shares = self._shares(blocks)
        places = [iter(writer.places(share)) for writer, share in zip((self.first, self._second), shares, strict=True)]
        return [next(places[block.name in self._second_names]) for block in blocks]

    def filled(self, blocks: Sequence[Block]) -> None:
        """Each hears of its own."""
        for writer, share in zip((self.first, self._second), self._shares(blocks), strict=True):
            writer.filled(share)

    def _shares(self, blocks: Sequence[Block]) -> tuple[list[Block], list[Block]]:
        second = [block for block in blocks if block.name in self._second_names]
        return [block for block in blocks if block.name not in self._second_names], second

    def finish(self) -> None:
        """Closes both."""
        self.first.finish()
        self._second.finish()

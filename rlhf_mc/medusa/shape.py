"""The tensors of the draft heads: their names and sizes, in files, on a rank that trains, and on a rank of the engine. Pure; no torch.

The names are vLLM's, in all three places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_mc.config import Medusa
from rlhf_mc.models.hf_config import VOCAB_PADDING, ModelShape
from rlhf_mc.parallel.reshard import Piece


@dataclass(frozen=True)
class HeadsShape:
    """num_heads heads of num_layers residual blocks [hidden, hidden] each; output layers [vocab, hidden] unless the model's is shared."""

    num_heads: int
    num_layers: int
    shared_output: bool
    hidden: int
    vocab: int

    @staticmethod
    def of(settings: Medusa, model: ModelShape) -> HeadsShape:
        """The heads that `settings` ask for, on a model of this shape."""
        return HeadsShape(settings.num_heads, settings.num_layers, settings.shared_output, model.hidden, model.vocab)

    @staticmethod
    def if_enabled(settings: Medusa, model: ModelShape) -> HeadsShape | None:
        """The same; None where the run has no draft heads."""
        return HeadsShape.of(settings, model) if settings.enabled else None

    @property
    def block_names(self) -> list[str]:
        """The weights of all residual blocks."""
        return [f"blocks.{head}.layers.{layer}.weight" for head in range(self.num_heads) for layer in range(self.num_layers)]

    @property
    def output_names(self) -> list[str]:
        """The output layers; none where the model's is shared."""
        return [] if self.shared_output else [f"lm_heads.{head}.weight" for head in range(self.num_heads)]

    def tensors(self) -> dict[str, tuple[int, int]]:
        """Every whole tensor with its shape, in the order of the files."""
        blocks = dict.fromkeys(self.block_names, (self.hidden, self.hidden))
        return blocks | dict.fromkeys(self.output_names, (self.vocab, self.hidden))

    @property
    def num_params(self) -> int:
        """Elements of all tensors."""
        return sum(rows * columns for rows, columns in self.tensors().values())


def trainer_pieces(shape: HeadsShape, padded_vocab: int, tensor: int, tensor_rank: int) -> list[Piece]:
    """What one tensor rank of the last pipeline stage holds: rows of every block, and rows of every output layer."""
    rows = shape.hidden // tensor
    blocks = [Piece(name, name, 0, 0, tensor_rank * rows, rows) for name in shape.block_names]
    return [*blocks, *_output_pieces(shape, padded_vocab, tensor, tensor_rank)]


def engine_pieces(shape: HeadsShape, tensor: int, tensor_rank: int) -> list[Piece]:
    """What one rank of an engine holds: every block whole, as vLLM's heads are, and rows of every output layer."""
    blocks = [Piece(name, name, 0, 0, 0, shape.hidden) for name in shape.block_names]
    padded_vocab = -(-shape.vocab // VOCAB_PADDING) * VOCAB_PADDING
    return [*blocks, *_output_pieces(shape, padded_vocab, tensor, tensor_rank)]


def _output_pieces(shape: HeadsShape, padded_vocab: int, tensor: int, tensor_rank: int) -> Iterator[Piece]:
    rows = padded_vocab // tensor
    start = tensor_rank * rows
    length = min(shape.vocab, start + rows) - start
    if length > 0:
        yield from (Piece(name, name, 0, 0, start, length) for name in shape.output_names)

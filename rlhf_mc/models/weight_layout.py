"""Which rows or columns of which Hugging Face tensor make up each parameter of one rank's shard. Pure; no torch.

Two maps: of the trainer's shard (`pieces_of`; import, export and weight sync read it) with the names of megatron-core's
GPTModel with local (unfused) layers, numbered as in the whole model; and of the engine's (`engine_pieces`; weight sync) with
vLLM's names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_mc.models.hf_config import VOCAB_PADDING, ModelShape
from rlhf_mc.parallel.grids import TrainingGrid
from rlhf_mc.parallel.reshard import Piece

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"


@dataclass(frozen=True)
class Shard:
    """One rank's place in the model: tensor rank of `tensor`, and the numbers of its layers, of all its chunks."""

    tensor: int
    tensor_rank: int
    layers: tuple[int, ...]
    is_first_stage: bool
    is_last_stage: bool
    value_head: bool = False

    @staticmethod
    def of(shape: ModelShape, grid: TrainingGrid, value_head: bool) -> Shard:
        """The shard of the rank in the place of `grid`."""
        size = shape.num_layers // (grid.pipeline * grid.virtual)
        layers = tuple(chunk * size + local for chunk in grid.chunks for local in range(size))
        return Shard(grid.tensor, grid.tensor_rank, layers, grid.is_first_stage, grid.is_last_stage, value_head)


def hf_shapes(shape: ModelShape, value_head: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face checkpoint with its shape, in the order in which it is written."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for layer in range(shape.num_layers):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (shape.hidden,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, shape.hidden)
            if shape.qkv_bias:
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        if shape.qk_norm:
            shapes[at + "self_attn.q_norm.weight"] = (shape.head_dim,)
            shapes[at + "self_attn.k_norm.weight"] = (shape.head_dim,)
        shapes[at + "self_attn.o_proj.weight"] = (shape.hidden, q)
        shapes[at + "post_attention_layernorm.weight"] = (shape.hidden,)
        shapes[at + "mlp.gate_proj.weight"] = (shape.ffn, shape.hidden)
        shapes[at + "mlp.up_proj.weight"] = (shape.ffn, shape.hidden)
        shapes[at + "mlp.down_proj.weight"] = (shape.hidden, shape.ffn)
    shapes["model.norm.weight"] = (shape.hidden,)
    if value_head:
        shapes["score.weight"] = (1, shape.hidden)
    elif not shape.tied:
        shapes["lm_head.weight"] = (shape.vocab, shape.hidden)
    return shapes


def _vocabulary_piece(shape: ModelShape, shard: Shard, param: str, name: str, owner: bool) -> Iterator[Piece]:
    rows = shape.padded_vocab(shard.tensor) // shard.tensor
    start = shard.tensor_rank * rows
    length = min(shape.vocab, start + rows) - start
    if length > 0:
        yield Piece(param, name, 0, 0, start, length, owner)


def _attention_pieces(shape: ModelShape, shard: Shard, ours: str, theirs: str) -> Iterator[Piece]:
    """megatron's fused QKV holds, for each key/value head: its query heads, then its key, then its value."""
    d = shape.head_dim
    queries = shape.num_heads // shape.num_kv_heads
    kv_heads = shape.num_kv_heads // shard.tensor
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        param = f"{ours}self_attention.linear_qkv.{kind}"
        for local in range(kv_heads):
            group, start = shard.tensor_rank * kv_heads + local, local * (queries + 2) * d
            yield Piece(param, f"{theirs}self_attn.q_proj.{kind}", 0, start, group * queries * d, queries * d)
            yield Piece(param, f"{theirs}self_attn.k_proj.{kind}", 0, start + queries * d, group * d, d)
            yield Piece(param, f"{theirs}self_attn.v_proj.{kind}", 0, start + (queries + 1) * d, group * d, d)
    if shape.qk_norm:
        for name in ("q", "k"):
            yield Piece(f"{ours}self_attention.{name}_layernorm.weight", f"{theirs}self_attn.{name}_norm.weight", 0, 0, 0, d)
    columns = shape.num_heads * d // shard.tensor
    yield Piece(
        f"{ours}self_attention.linear_proj.weight", f"{theirs}self_attn.o_proj.weight", 1, 0, shard.tensor_rank * columns, columns
    )


def _layer_pieces(shape: ModelShape, shard: Shard, ours: str, theirs: str) -> Iterator[Piece]:
    yield Piece(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight", 0, 0, 0, shape.hidden)
    yield from _attention_pieces(shape, shard, ours, theirs)
    yield Piece(f"{ours}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight", 0, 0, 0, shape.hidden)
    width = shape.ffn // shard.tensor
    first = shard.tensor_rank * width
    yield Piece(f"{ours}mlp.linear_fc1.weight", f"{theirs}mlp.gate_proj.weight", 0, 0, first, width)
    yield Piece(f"{ours}mlp.linear_fc1.weight", f"{theirs}mlp.up_proj.weight", 0, width, first, width)
    yield Piece(f"{ours}mlp.linear_fc2.weight", f"{theirs}mlp.down_proj.weight", 1, 0, first, width)


def pieces_of(shape: ModelShape, shard: Shard) -> list[Piece]:
    """All pieces of one rank's shard, in the order of the Hugging Face checkpoint.

    A value head is whole on every tensor rank of the last stage. Norm weights are whole on every tensor rank.
    """
    pieces: list[Piece] = []
    if shard.is_first_stage:
        pieces += _vocabulary_piece(shape, shard, EMBEDDING, "model.embed_tokens.weight", True)
    for layer in shard.layers:
        pieces += _layer_pieces(shape, shard, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    if shard.is_last_stage:
        pieces.append(Piece(FINAL_NORM, "model.norm.weight", 0, 0, 0, shape.hidden))
        if shard.value_head:
            pieces.append(Piece(OUTPUT, "score.weight", 0, 0, 0, 1))
        elif not shape.tied:
            pieces += _vocabulary_piece(shape, shard, OUTPUT, "lm_head.weight", True)
        elif not shard.is_first_stage:
            pieces += _vocabulary_piece(shape, shard, OUTPUT, "model.embed_tokens.weight", False)
    return pieces


def engine_pieces(shape: ModelShape, tensor: int, tensor_rank: int) -> list[Piece]:
    """All pieces of one engine rank's shard, by vLLM's names, in the order of the Hugging Face checkpoint.

    vLLM keeps q, k and v, and gate and up, in one weight each; where there are more ranks than key/value heads, ranks share a
    head. A tied output layer is the embedding itself. Padded rows of the vocabulary belong to no piece.
    """
    pieces = _engine_vocabulary(shape, tensor, tensor_rank, "model.embed_tokens.weight")
    for layer in range(shape.num_layers):
        pieces += _engine_layer(shape, tensor, tensor_rank, f"model.layers.{layer}.")
    pieces.append(Piece("model.norm.weight", "model.norm.weight", 0, 0, 0, shape.hidden))
    if not shape.tied:
        pieces += _engine_vocabulary(shape, tensor, tensor_rank, "lm_head.weight")
    return pieces


def _engine_vocabulary(shape: ModelShape, tensor: int, tensor_rank: int, name: str) -> list[Piece]:
    rows = -(-shape.vocab // VOCAB_PADDING) * VOCAB_PADDING // tensor
    start = tensor_rank * rows
    length = min(shape.vocab, start + rows) - start
    return [Piece(name, name, 0, 0, start, length)] if length > 0 else []


def _engine_layer(shape: ModelShape, tensor: int, tensor_rank: int, at: str) -> Iterator[Piece]:
    d, hidden, width = shape.head_dim, shape.hidden, shape.ffn // tensor
    heads, kv_heads = shape.num_heads // tensor, max(1, shape.num_kv_heads // tensor)
    kv_start = tensor_rank * shape.num_kv_heads // tensor * d
    yield Piece(f"{at}input_layernorm.weight", f"{at}input_layernorm.weight", 0, 0, 0, hidden)
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        qkv = f"{at}self_attn.qkv_proj.{kind}"
        yield Piece(qkv, f"{at}self_attn.q_proj.{kind}", 0, 0, tensor_rank * heads * d, heads * d)
        yield Piece(qkv, f"{at}self_attn.k_proj.{kind}", 0, heads * d, kv_start, kv_heads * d)
        yield Piece(qkv, f"{at}self_attn.v_proj.{kind}", 0, (heads + kv_heads) * d, kv_start, kv_heads * d)
    if shape.qk_norm:
        for norm in ("q_norm", "k_norm"):
            yield Piece(f"{at}self_attn.{norm}.weight", f"{at}self_attn.{norm}.weight", 0, 0, 0, d)
    yield Piece(f"{at}self_attn.o_proj.weight", f"{at}self_attn.o_proj.weight", 1, 0, tensor_rank * heads * d, heads * d)
    yield Piece(f"{at}post_attention_layernorm.weight", f"{at}post_attention_layernorm.weight", 0, 0, 0, hidden)
    yield Piece(f"{at}mlp.gate_up_proj.weight", f"{at}mlp.gate_proj.weight", 0, 0, tensor_rank * width, width)
    yield Piece(f"{at}mlp.gate_up_proj.weight", f"{at}mlp.up_proj.weight", 0, width, tensor_rank * width, width)
    yield Piece(f"{at}mlp.down_proj.weight", f"{at}mlp.down_proj.weight", 1, 0, tensor_rank * width, width)

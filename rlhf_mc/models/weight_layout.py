"""Which rows or columns of which Hugging Face tensor make up each parameter of one rank's shard. Pure; no torch.

Import, export and weight sync all read this one map, each in its own direction.
Names on the trainer's side are those of megatron-core's GPTModel with local (unfused) layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_mc.models.hf_config import ModelShape

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"


@dataclass(frozen=True)
class Piece:
    """`length` rows (dim 0) or columns (dim 1) of `hf_name` from `hf_start`, held in `param` from `start`.

    owner: whether this copy is the one to export (the second copy of tied embeddings is not).
    """

    param: str
    hf_name: str
    dim: int
    start: int
    hf_start: int
    length: int
    owner: bool = True


@dataclass(frozen=True)
class Shard:
    """One rank's place in the model: tensor rank of `tensor`, and layers `first_layer` .. `first_layer + num_layers`."""

    tensor: int
    tensor_rank: int
    first_layer: int
    num_layers: int
    is_first_stage: bool
    is_last_stage: bool
    value_head: bool = False

    @staticmethod
    def of(shape: ModelShape, tensor: int, tensor_rank: int, pipeline: int, stage: int, value_head: bool) -> Shard:
        """The shard of pipeline stage `stage` of `pipeline` and tensor rank `tensor_rank` of `tensor`."""
        per_stage = shape.num_layers // pipeline
        return Shard(tensor, tensor_rank, stage * per_stage, per_stage, stage == 0, stage == pipeline - 1, value_head)


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


def _vocabulary_piece(shape: ModelShape, shard: Shard, param: str, hf_name: str, owner: bool) -> Iterator[Piece]:
    rows = shape.padded_vocab(shard.tensor) // shard.tensor
    start = shard.tensor_rank * rows
    length = min(shape.vocab, start + rows) - start
    if length > 0:
        yield Piece(param, hf_name, 0, 0, start, length, owner)


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
    for local in range(shard.num_layers):
        pieces += _layer_pieces(shape, shard, f"decoder.layers.{local}.", f"model.layers.{shard.first_layer + local}.")
    if shard.is_last_stage:
        pieces.append(Piece(FINAL_NORM, "model.norm.weight", 0, 0, 0, shape.hidden))
        if shard.value_head:
            pieces.append(Piece(OUTPUT, "score.weight", 0, 0, 0, 1))
        elif not shape.tied:
            pieces += _vocabulary_piece(shape, shard, OUTPUT, "lm_head.weight", True)
        elif not shard.is_first_stage:
            pieces += _vocabulary_piece(shape, shard, OUTPUT, "model.embed_tokens.weight", False)
    return pieces

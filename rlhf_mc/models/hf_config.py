"""What a Hugging Face config.json says about a dense decoder: read, checked, and kept as one record.

Imports no torch, so that settings and plans can be checked before anything heavy is loaded.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_mc.config import ConfigError, Parallel
from rlhf_mc.parallel.balance import SequenceCost

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForSequenceClassification": "llama",
    "MistralForSequenceClassification": "mistral",
    "Qwen2ForSequenceClassification": "qwen2",
    "Qwen3ForSequenceClassification": "qwen3",
}


VOCAB_PADDING = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE


def padded_rows(vocab: int, tensor_parallel: int) -> int:
    """Rows of an embedding of `vocab` tokens in the trainer: padded as vLLM pads, so that shards of both begin at the same rows."""
    unit = math.lcm(VOCAB_PADDING, tensor_parallel)
    return -(-vocab // unit) * unit


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of one model. `ffn` is the width of the gated MLP, `head_dim` of one attention head.

    rope: the config's rope parameters (at least rope_type and rope_theta), as transformers reads them.
    sliding_window: attention span in tokens, or None for full causal attention.
    """

    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rope: dict[str, Any]
    sliding_window: int | None
    max_positions: int
    has_value_head: bool

    @property
    def num_params(self) -> int:
        """Elements of all weights of the language model, a tied one counted once."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden * (2 * queries + 2 * keys) + (queries + 2 * keys if self.qkv_bias else 0)
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        layers = self.num_layers * (attention + 3 * self.hidden * self.ffn + norms)
        return layers + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)

    def sequence_cost(self, answers_are_words: bool, pipeline: int) -> SequenceCost:
        """What a sequence costs the last of `pipeline` stages, which has the head and so most to do.

        answers_are_words: each number asked of the model takes a row of logits; a value head's product is nothing beside it.
        Two FLOPs a multiply-add; attention has two products, q k^T and p v.
        """
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layers = self.num_layers // pipeline
        return SequenceCost(
            per_token=2 * layers * self.hidden * (2 * queries + 2 * keys + 3 * self.ffn),
            per_pair=2 * layers * 2 * queries,
            per_answer=2 * self.hidden * self.vocab if answers_are_words else 0,
            window=self.sliding_window,
        )

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Rows of the embedding in the trainer."""
        return padded_rows(self.vocab, tensor_parallel)

    def check_layout(self, parallel: Parallel, key: str) -> None:
        """Raises ConfigError where the model cannot be split over the ranks as the settings ask."""
        tensor, pipeline, virtual = parallel.tensor, parallel.pipeline, parallel.virtual_pipeline
        for what, size in (("attention heads", self.num_heads), ("key/value heads", self.num_kv_heads), ("ffn width", self.ffn)):
            if size % tensor:
                raise ConfigError(
                    f"parallel.tensor={tensor} does not divide the {size} {what} of {key}; "
                    f"use a tensor-parallel size that divides {size}"
                )
        if self.num_layers % pipeline:
            raise ConfigError(
                f"parallel.pipeline={pipeline} does not divide the {self.num_layers} layers of {key}; "
                f"use a pipeline size that divides {self.num_layers}"
            )
        if self.num_layers % (pipeline * virtual):
            raise ConfigError(
                f"parallel.virtual_pipeline={virtual} does not divide the {self.num_layers // pipeline} layers of {key} on each of "
                f"{pipeline} pipeline stages; use a number of chunks that divides {self.num_layers // pipeline}"
            )


def _refuse(path: Path, key: str, why: str) -> ConfigError:
    return ConfigError(f"{key}: {path}: {why}")


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Rope parameters in the form of transformers 5, from either the old or the new spelling."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    return rope


def _sliding_window(raw: dict[str, Any], family: str) -> int | None:
    window = raw.get("sliding_window")
    if family in ("qwen2", "qwen3") and not raw.get("use_sliding_window", False):
        return None
    return window


def read_shape(directory: str | Path, key: str = "model") -> ModelShape:
    """Reads DIRECTORY/config.json. `key` is the setting that named the directory, for messages. Raises ConfigError."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{key}: no model at '{directory}' (no config.json there); name a local Hugging Face directory")
    raw = json.loads(path.read_text())
    architecture = (raw.get("architectures") or ["none"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        raise _refuse(path, key, f"architecture {architecture} is not supported; supported are {', '.join(FAMILIES)}")
    if raw.get("attention_bias") and family in ("llama", "mistral", "qwen3"):
        raise _refuse(path, key, "attention_bias=true puts a bias on the output projection, which is not supported")
    if raw.get("mlp_bias"):
        raise _refuse(path, key, "mlp_bias=true is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise _refuse(path, key, f"hidden_act={raw['hidden_act']} is not supported; only silu is")
    if family in ("qwen2", "qwen3") and raw.get("use_sliding_window") and raw.get("max_window_layers", 0) not in (0, None):
        raise _refuse(path, key, "sliding windows on some layers only (max_window_layers > 0) are not supported")
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    if family == "qwen2" and head_dim * heads != raw["hidden_size"]:
        why = f"head_dim={head_dim} is not hidden_size / num_attention_heads, which vLLM takes for it in Qwen2"
        raise _refuse(path, key, f"{why}; this is not supported")
    return ModelShape(
        family=family,
        num_layers=raw["num_hidden_layers"],
        hidden=raw["hidden_size"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        ffn=raw["intermediate_size"],
        vocab=raw["vocab_size"],
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tied=raw.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rope=_rope(raw),
        sliding_window=_sliding_window(raw, family),
        max_positions=raw.get("max_position_embeddings", 2048),
        has_value_head=architecture.endswith("SequenceClassification"),
    )

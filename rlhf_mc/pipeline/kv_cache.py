"""Bytes of vLLM's KV cache. Pure; no torch."""

from __future__ import annotations

import math

from rlhf_mc.models.hf_config import ModelShape

#: Tokens of a block of the KV cache and of cached prefixes; vLLM's CPU attention needs a multiple of 32.
BLOCK_TOKENS = 32


def token_bytes(shape: ModelShape, tensor_parallel: int, dtype_bytes: int) -> int:
    """Keys and values of one token on one of `tensor_parallel` ranks; where there are more ranks than heads, ranks share a head."""
    return 2 * shape.num_layers * max(1, shape.num_kv_heads // tensor_parallel) * shape.head_dim * dtype_bytes


def sequence_bytes(shape: ModelShape, num_tokens: int, tensor_parallel: int, dtype_bytes: int) -> int:
    """Keys and values of one sequence on one rank: whole blocks, and the one that vLLM sets aside."""
    num_blocks = math.ceil(num_tokens / BLOCK_TOKENS) + 1
    return num_blocks * BLOCK_TOKENS * token_bytes(shape, tensor_parallel, dtype_bytes)

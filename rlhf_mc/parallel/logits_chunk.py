"""How much of the logits exists at once: one chunk of tokens. Pure; no torch."""

from __future__ import annotations

#: Logits of one chunk, in elements.
CHUNK_ELEMENTS = 1 << 24


def chunk_tokens(num_rows: int) -> int:
    """Tokens of a chunk, for a shard of `num_rows` rows of the output layer."""
    return max(1, CHUNK_ELEMENTS // max(1, num_rows))


def chunk_bytes(num_tokens: int, num_rows: int) -> int:
    """Bytes beside hidden states and gradients while log-probs are made or taken back: two float32 matrices of a chunk's logits."""
    return 8 * min(num_tokens, chunk_tokens(num_rows)) * num_rows

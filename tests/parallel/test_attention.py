"""Packed attention against attention of one sequence at a time in plain torch, float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhf_mc.parallel import attention_calls
from rlhf_mc.parallel.attention import PackedAttention, pack_sequences
from rlhf_mc.parallel.attention_calls import attend, group_by_length, padded_calls, ragged_calls
from rlhf_mc.parallel.context import cut_sequences

HEADS, KV_HEADS, HEAD_DIM, POSITIONS = 4, 2, 6, 64


def tables() -> tuple[Tensor, Tensor]:
    """cos, sin [positions, head_dim] with the two halves alike."""
    frequencies = 1.0 / 100.0 ** (torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    angles = torch.outer(torch.arange(POSITIONS).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def random_qkv(num_tokens: int, kv_heads: int = KV_HEADS, seed: int = 0) -> list[Tensor]:
    """query [T, heads, d], key and value [T, kv_heads, d], float64."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [HEADS, kv_heads, kv_heads]
    return [torch.randn(num_tokens, heads, HEAD_DIM, generator=generator, dtype=torch.float64) for heads in sizes]


def packed_attention(qkv: list[Tensor], lengths: list[int], window: int | None = None) -> Tensor:
    """[T, heads * d] by the module under test."""
    config = TransformerConfig(num_layers=1, hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, kv_channels=HEAD_DIM)
    sequences = pack_sequences(cut_sequences(torch.tensor(lengths)), *tables(), torch.device("cpu"))
    return PackedAttention(config, layer_number=1, window=window)(*qkv, attention_mask=None, packed_seq_params=sequences)


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding of one sequence [L, heads, d], pairs (i, i + d/2) turned as complex numbers."""
    cos, sin = (table[: x.size(0), None, : HEAD_DIM // 2].double() for table in tables())
    first, second = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def plain_attention(qkv: list[Tensor], window: int | None = None) -> Tensor:
    """[L, heads * d] of one sequence, by the formula."""
    query, key, value = rotated(qkv[0]), rotated(qkv[1]), qkv[2]
    key, value = (x.repeat_interleave(HEADS // x.size(1), dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5
    distance = torch.arange(query.size(0))[:, None] - torch.arange(query.size(0))[None, :]
    visible = (distance >= 0) & (distance < (window or query.size(0)))
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def one_by_one(qkv: list[Tensor], lengths: list[int], window: int | None = None) -> Tensor:
    parts = zip(*(x.split(lengths) for x in qkv))
    return torch.cat([plain_attention(list(part), window) for part in parts])


def with_gradients(attention, qkv: list[Tensor], *arguments) -> list[Tensor]:
    """The output, and the gradients of its sum of squares."""
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = attention(leaves, *arguments)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def assert_equal_to_plain(lengths: list[int], window: int | None = None, kv_heads: int = KV_HEADS) -> None:
    qkv = random_qkv(sum(lengths), kv_heads)
    ours, theirs = with_gradients(packed_attention, qkv, lengths, window), with_gradients(one_by_one, qkv, lengths, window)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 24), min_size=1, max_size=8), st.sampled_from([None, 1, 5]))
def test_packed_equals_one_by_one(lengths: list[int], window: int | None) -> None:
    """Output and gradients, with any mix of lengths, under and over the sliding window."""
    assert_equal_to_plain(lengths, window)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_queries(kv_heads: int) -> None:
    assert_equal_to_plain([5, 9, 1], kv_heads=kv_heads)


def test_sequences_of_one_token_return_their_value() -> None:
    qkv = random_qkv(3)
    expected = qkv[2].repeat_interleave(HEADS // KV_HEADS, dim=1).flatten(1)
    torch.testing.assert_close(packed_attention(qkv, [1, 1, 1]), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
def test_nan_in_one_sequence_does_not_reach_another(window: int | None) -> None:
    """Forward and backward; the sequences are so alike in length that they share a kernel call."""
    lengths = [8, 7, 8, 6]
    assert group_by_length(lengths) == [[0, 2, 1, 3]]
    clean = random_qkv(sum(lengths))
    poisoned = [x.clone() for x in clean]
    for x in poisoned:
        x[8:15] = float("nan")
    elsewhere = torch.ones(sum(lengths), dtype=torch.bool)
    elsewhere[8:15] = False
    before, after = (with_gradients(packed_attention, qkv, lengths, window) for qkv in (clean, poisoned))
    for expected, actual in zip(before, after):
        assert torch.equal(actual[elsewhere], expected[elsewhere])
        assert actual[~elsewhere].isnan().any()


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=40))
def test_groups_bound_the_padding(lengths: list[int]) -> None:
    groups = group_by_length(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        members = [lengths[index] for index in group]
        assert min(members) >= 0.75 * max(members) == 0.75 * members[0]


def flash_attention(query, key, value, query_offsets, key_offsets, longest_query, longest_key, *, scale, window_size, enable_gqa):
    """What torch.nn.attention.varlen computes on a GPU, row by row: the last query of a row is aligned with its last key."""
    assert (query.size(1) != key.size(1)) == enable_gqa and window_size[1] == 0
    assert (longest_query, longest_key) == (query_offsets.diff().max(), key_offsets.diff().max())
    assert query_offsets.dtype == key_offsets.dtype == torch.int32
    outputs = []
    for row in range(query_offsets.numel() - 1):
        q, k, v = (x[o[row] : o[row + 1]] for x, o in ((query, query_offsets), (key, key_offsets), (value, key_offsets)))
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        distance = torch.arange(q.size(0))[:, None] + k.size(0) - q.size(0) - torch.arange(k.size(0))[None, :]
        visible = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        weights = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~visible, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("context", [1, 2, 3])
def test_ragged_calls_ask_for_the_same_as_padded_ones(monkeypatch: pytest.MonkeyPatch, context: int, window: int | None) -> None:
    """Output and gradients on each context rank; the kernel itself needs a GPU (the test below)."""
    monkeypatch.setattr(attention_calls, "varlen_attn", flash_attention)
    cut = cut_sequences(torch.tensor([9, 1, 4, 13, 2, 1]), context)
    qkv = random_qkv(30)
    for rank in range(context):
        arguments = qkv[0][cut.held[rank]], *(x[cut.held.flatten()] for x in qkv[1:])

        def of_rank(leaves: list[Tensor], calls: list) -> Tensor:
            return torch.cat(attend(calls, *leaves, 0.3, window))[torch.cat([call.tokens for call in calls]).argsort()]

        ragged, padded = (with_gradients(of_rank, list(arguments), calls(cut, rank)) for calls in (ragged_calls, padded_calls))
        torch.testing.assert_close(ragged, padded, rtol=1e-10, atol=1e-10)


def test_a_ragged_call_moves_nothing_without_context_parallel() -> None:
    [call] = ragged_calls(cut_sequences(torch.tensor([9, 1, 4])), 0)
    assert call.queries.tokens is None and call.keys.tokens is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel is for CUDA")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("context", [1, 2])
def test_the_ragged_kernel_on_a_gpu(context: int, window: int | None) -> None:
    """bfloat16 against float32 of the padded kernel."""
    cut, device = cut_sequences(torch.tensor([90, 1, 40, 130, 20, 1]), context), torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(282, heads, 64, generator=generator).bfloat16().to(device) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    for rank in range(context):
        arguments = qkv[0][cut.held[rank]], *(x[cut.held.flatten()] for x in qkv[1:])
        for ragged in ragged_calls(cut, rank):
            [out] = attend([ragged.to(device)], *arguments, 0.125, window)
            exact = torch.zeros_like(qkv[0][cut.held[rank]].float())
            for padded in padded_calls(cut, rank):
                [exact[padded.tokens]] = attend([padded.to(device)], *(x.float() for x in arguments), 0.125, window)
            torch.testing.assert_close(out.float(), exact[ragged.tokens], rtol=2e-2, atol=2e-2)

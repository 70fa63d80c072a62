"""Attention over packed sequences: megatron's core-attention slot, filled by a module of ours.

Sequences lie one after another in the token dimension ("thd"). Rotary positions restart with each sequence, and no
sequence sees another. Inside the kernel only, sequences of similar length are padded on the right to a common length;
causal masking keeps padding out of every real row, and each sequence is its own batch row, so a NaN stays where it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlhf_mc.batch import offsets_of, ragged_arange

# Sequences share a kernel call if the shortest is at least this share of the longest: it bounds the padded work.
_MIN_LENGTH_RATIO = 0.75
# Up to this length, torch's CPU attention is faster in fp32 than in bf16, backward included.
_LONGEST_IN_FP32 = 256


@dataclass(frozen=True)
class KernelGroup:
    """Sequences that go through one attention call.

    tokens: int64[n], their tokens in the packed order.  places: int64[n], where these lie in the padded [rows * longest].
    padded: int64[rows * longest], the packed token at each place; T, one past the last, at places of padding.
    """

    tokens: Tensor
    places: Tensor
    padded: Tensor
    rows: int
    longest: int

    def to(self, device: torch.device) -> KernelGroup:
        """The same on `device`."""
        return replace(self, tokens=self.tokens.to(device), places=self.places.to(device), padded=self.padded.to(device))


@dataclass
class PackedSequences(PackedSeqParams):
    """megatron's packed-sequence record, with what our attention needs, computed once for all layers.

    cos, sin: float32[T, head_dim], rotary tables at each token's position in its own sequence.
    groups: the kernel calls.  order: int64[T] or None, takes the groups' concatenated outputs back to packed order.
    """

    cos: Tensor = field(default=None)
    sin: Tensor = field(default=None)
    groups: tuple[KernelGroup, ...] = ()
    order: Tensor | None = None


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Sequence numbers, longest first, cut where a sequence is shorter than the allowed share of its group's longest."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[index] >= _MIN_LENGTH_RATIO * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _kernel_group(members: list[int], lengths: Tensor, offsets: Tensor) -> KernelGroup:
    index = torch.tensor(members)
    chosen = lengths[index]
    within = ragged_arange(chosen)
    longest = int(chosen.max())
    tokens = offsets[index].repeat_interleave(chosen) + within
    places = torch.arange(len(members)).repeat_interleave(chosen) * longest + within
    padded = torch.full((len(members) * longest,), int(offsets[-1]))
    padded[places] = tokens
    return KernelGroup(tokens, places, padded, len(members), longest)


def pack_sequences(lengths: Tensor, cos: Tensor, sin: Tensor, device: torch.device) -> PackedSequences:
    """The record for sequences of these lengths (int64[B], host). cos, sin: tables [positions, head_dim] on `device`."""
    offsets = offsets_of(lengths)
    groups = [_kernel_group(members, lengths, offsets) for members in group_by_length(lengths.tolist())]
    source = torch.cat([g.tokens for g in groups])
    in_order = bool((source == torch.arange(source.numel())).all())
    positions = ragged_arange(lengths).to(device)
    cu_seqlens = offsets.to(device=device, dtype=torch.int32)
    longest = int(lengths.max())
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cos=cos[positions],
        sin=sin[positions],
        groups=tuple(group.to(device) for group in groups),
        order=None if in_order else source.argsort().to(device),
    )


class _Pad(torch.autograd.Function):
    """The group's tokens at their padded places, zeros elsewhere. A token lies at one place, so the backward only selects."""

    @staticmethod
    def forward(ctx, x: Tensor, group: KernelGroup) -> Tensor:
        ctx.group, ctx.size = group, x.size(0)
        return torch.cat((x, x.new_zeros(1, *x.shape[1:]))).index_select(0, group.padded)

    @staticmethod
    def backward(ctx, grad: Tensor):
        back = grad.new_zeros(ctx.size, *grad.shape[1:])
        back[ctx.group.tokens] = grad.index_select(0, ctx.group.places)
        return back, None


class _Unpad(torch.autograd.Function):
    """The padded places' tokens, in the group's order; the backward pads."""

    @staticmethod
    def forward(ctx, x: Tensor, group: KernelGroup) -> Tensor:
        ctx.group = group
        return x.index_select(0, group.places)

    @staticmethod
    def backward(ctx, grad: Tensor):
        group = ctx.group
        back = grad.new_zeros(group.padded.numel(), *grad.shape[1:])
        back[group.places] = grad
        return back, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    """Halves (a, b) of each head become (a cos - b sin, b cos + a sin), sin taken `direction` times."""
    first, second = x.chunk(2, dim=-1)
    cos_a, cos_b = cos.chunk(2, dim=-1)
    sin_a, sin_b = sin.chunk(2, dim=-1)
    out = torch.empty_like(x)
    out_a, out_b = out.chunk(2, dim=-1)
    torch.mul(first, cos_a, out=out_a).addcmul_(second, sin_a, value=-direction)
    torch.mul(second, cos_b, out=out_b).addcmul_(first, sin_b, value=direction)
    return out


class _Rotary(torch.autograd.Function):
    """Rotary embedding (arXiv:2104.09864), halves not interleaved. x [T, heads, d]; cos, sin [T, 1, d] in x's dtype.

    A rotation's backward is the rotation back (scaled alike).
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _turn(grad, *ctx.saved_tensors, -1.0), None, None


def _causal_mask(longest: int, window: int | None, device: torch.device) -> Tensor | None:
    """bool[L, L], true where a query may look, for a sliding window shorter than L; None for plain causal."""
    if window is None or longest <= window:
        return None
    distance = torch.arange(longest, device=device)[:, None] - torch.arange(longest, device=device)[None, :]
    return (distance >= 0) & (distance < window)


def _kernel_dtype(query: Tensor, longest: int) -> torch.dtype:
    """fp32 for short bf16 sequences on CPU, where torch's bf16 backward costs about 60 ms a call before any work; else query's own."""
    short_on_cpu = query.device.type == "cpu" and query.dtype == torch.bfloat16 and longest <= _LONGEST_IN_FP32
    return torch.float32 if short_on_cpu else query.dtype


class PackedAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v within each sequence, causal, with rotary positions and grouped queries.

    Takes megatron's packed layout: query [T, heads, d], key and value [T, kv_heads, d], heads of this tensor rank;
    gives [T, heads * d]. Needs PackedSequences as packed_seq_params.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, window: int | None = None, **megatron_arguments) -> None:
        super().__init__()
        self.window = window
        self.scale = 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, packed_seq_params: PackedSequences, **kwargs
    ) -> Tensor:
        packed = packed_seq_params
        cos, sin = packed.cos[:, None].to(query.dtype), packed.sin[:, None].to(query.dtype)
        query, key = _Rotary.apply(query, cos, sin), _Rotary.apply(key, cos, sin)
        outputs = [self._attend(query, key, value, group) for group in packed.groups]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        out = out if packed.order is None else out.index_select(0, packed.order)
        return out.reshape(out.size(0), -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, group: KernelGroup) -> Tensor:
        """One kernel call; the group's tokens in the group's order, [n, heads, d]."""
        shape = (group.rows, group.longest)
        dtype = _kernel_dtype(query, group.longest)
        q, k, v = (_Pad.apply(x, group).view(*shape, *x.shape[1:]).transpose(1, 2).to(dtype) for x in (query, key, value))
        mask = _causal_mask(group.longest, self.window, query.device)
        grouped = query.size(1) != key.size(1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped)
        return _Unpad.apply(out.transpose(1, 2).reshape(-1, *query.shape[1:]), group).to(query.dtype)

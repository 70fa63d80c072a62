"""Attention over packed sequences: megatron's core-attention slot, filled by a module of ours.

Sequences lie one after another in the token dimension ("thd"). Rotary positions restart with each sequence, and no
sequence sees another. Inside the kernel only, sequences of similar length are padded on the right to a common length;
causal masking keeps padding out of every real row, and each sequence is its own batch row, so a NaN stays where it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlhf_mc.batch import offsets_of, ragged_arange

# Sequences share a kernel call if the shortest is at least this share of the longest: it bounds the padded work.
_MIN_LENGTH_RATIO = 0.75


@dataclass(frozen=True)
class KernelGroup:
    """Sequences that go through one attention call.

    source: int64[n], their tokens in the packed order.  destination: int64[n], places in the padded [rows * longest].
    """

    source: Tensor
    destination: Tensor
    rows: int
    longest: int


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
    rows = torch.arange(len(members)).repeat_interleave(chosen)
    return KernelGroup(offsets[index].repeat_interleave(chosen) + within, rows * longest + within, len(members), longest)


def pack_sequences(lengths: Tensor, cos: Tensor, sin: Tensor, device: torch.device) -> PackedSequences:
    """The record for sequences of these lengths (int64[B], host). cos, sin: tables [positions, head_dim] on `device`."""
    offsets = offsets_of(lengths)
    groups = [_kernel_group(members, lengths, offsets) for members in group_by_length(lengths.tolist())]
    source = torch.cat([g.source for g in groups])
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
        groups=tuple(KernelGroup(g.source.to(device), g.destination.to(device), g.rows, g.longest) for g in groups),
        order=None if in_order else source.argsort().to(device),
    )


class _MoveRows(torch.autograd.Function):
    """out[destination] = x[source], other rows zero. Each row moves at most once, so the backward is the reverse move."""

    @staticmethod
    def forward(ctx, x: Tensor, source: Tensor, destination: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(source, destination)
        ctx.size = x.size(0)
        return x.new_zeros(size, *x.shape[1:]).index_copy_(0, destination, x.index_select(0, source))

    @staticmethod
    def backward(ctx, grad: Tensor):
        source, destination = ctx.saved_tensors
        back = grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, source, grad.index_select(0, destination))
        return back, None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (arXiv:2104.09864), halves not interleaved. x [T, heads, d]; cos, sin [T, 1, d] in x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _causal_mask(longest: int, window: int | None, device: torch.device) -> Tensor | None:
    """bool[L, L], true where a query may look, for a sliding window shorter than L; None for plain causal."""
    if window is None or longest <= window:
        return None
    distance = torch.arange(longest, device=device)[:, None] - torch.arange(longest, device=device)[None, :]
    return (distance >= 0) & (distance < window)


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
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        outputs = [self._attend(query, key, value, group) for group in packed.groups]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        out = out if packed.order is None else out.index_select(0, packed.order)
        return out.reshape(out.size(0), -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, group: KernelGroup) -> Tensor:
        """One kernel call; the group's tokens in the group's order, [n, heads, d]."""
        size = group.rows * group.longest
        repeats = query.size(1) // key.size(1)
        q, k, v = (
            _MoveRows.apply(x, group.source, group.destination, size).view(group.rows, group.longest, *x.shape[1:]).transpose(1, 2)
            for x in (query, key, value)
        )
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        mask = _causal_mask(group.longest, self.window, query.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale)
        return out.transpose(1, 2).reshape(size, *query.shape[1:]).index_select(0, group.destination)

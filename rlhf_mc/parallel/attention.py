"""Attention over packed sequences: megatron's core-attention slot, filled by a module of ours.

Sequences lie one after another in the token dimension ("thd"). Rotary positions restart with each sequence, and no
sequence sees another. What the kernels take is in attention_calls.py.

Under context parallel a rank has the queries of two chunks of each sequence (parallel/context.py), and keys and values of the
same tokens. One all-gather a layer brings it the keys and values of the whole micro-batch, [T, kv_heads, d] each, whose
gradients one reduce-scatter takes back: each rank adds what its queries say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlhf_mc.batch import offsets_of
from rlhf_mc.parallel.attention_calls import AttentionCall, attend, padded_calls, ragged_calls
from rlhf_mc.parallel.context import ALONE, Context, ContextCut


@dataclass
class PackedSequences(PackedSeqParams):
    """megatron's packed-sequence record, with what our attention needs, computed once for all layers. T: tokens of this rank.

    cos, sin: float32[T, head_dim], rotary tables at each token's position in its own sequence.
    calls: of the kernel.  order: int64[T] or None, takes the calls' concatenated outputs back to packed order.
    context: the ranks that share the sequences.
    """

    cos: Tensor = field(default=None)
    sin: Tensor = field(default=None)
    calls: tuple[AttentionCall, ...] = ()
    order: Tensor | None = None
    context: Context = ALONE


def pack_sequences(
    cut: ContextCut, cos: Tensor, sin: Tensor, device: torch.device, context: Context = ALONE, ragged: bool = False
) -> PackedSequences:
    """The record for what this rank holds of the sequences. cos, sin: tables [positions, head_dim] on `device`.

    ragged: by the kernel that pads nothing, where there is one (`has_ragged_kernel`).
    """
    calls = (ragged_calls if ragged else padded_calls)(cut, context.rank)
    source = torch.cat([call.tokens for call in calls])
    in_order = bool((source == torch.arange(source.numel())).all())
    positions = cut.positions(context.rank).to(device)
    held_lengths = cut.sizes[context.rank].sum(dim=1)
    cu_seqlens = offsets_of(held_lengths).to(device=device, dtype=torch.int32)
    longest = int(held_lengths.max())
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cos=cos[positions],
        sin=sin[positions],
        calls=tuple(call.to(device) for call in calls),
        order=None if in_order else source.argsort().to(device),
        context=context,
    )


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


class PackedAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v within each sequence, causal, with rotary positions and grouped queries.

    Takes megatron's packed layout: query [T, heads, d], key and value [T, kv_heads, d], heads of this tensor rank and
    tokens of this context rank; gives [T, heads * d]. Needs PackedSequences as packed_seq_params.
    Collective over the context group, forward and backward.
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
        if packed.context.size > 1:
            # megatron's function, by its name for another group of ranks: all-gather, and in the backward reduce-scatter.
            both = gather_from_sequence_parallel_region(torch.stack((key, value), dim=1), group=packed.context.group)
            key, value = both.unbind(dim=1)
        outputs = attend(packed.calls, query, key, value, self.scale, self.window)
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        out = out if packed.order is None else out.index_select(0, packed.order)
        return out.reshape(out.size(0), -1)

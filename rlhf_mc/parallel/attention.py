"""Attention over packed sequences: megatron's core-attention slot, filled by a module of ours.

Sequences lie one after another in the token dimension ("thd"). Rotary positions restart with each sequence, and no
sequence sees another. Inside the kernel only, sequences of similar length are padded on the right to a common length;
no real query looks at padding, and each sequence is its own batch row, so a NaN stays where it is.

Under context parallel a rank has the queries of two chunks of each sequence (parallel/context.py), and keys and values of the
same tokens. One all-gather a layer brings it the keys and values of the whole micro-batch, [T, kv_heads, d] each, whose
gradients one reduce-scatter takes back: each rank adds what its queries say. A chunk then attends to the keys from the
start of its sequence to the chunk's own end and to no later ones, so that work which the causal mask would throw away is
done within the chunk at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlhf_mc.batch import offsets_of, ragged_arange
from rlhf_mc.parallel.context import ALONE, Context, ContextCut

# Sequences share a kernel call if the shortest is at least this share of the longest: it bounds the padded work.
_MIN_LENGTH_RATIO = 0.75
# Up to this length, torch's CPU attention is faster in fp32 than in bf16, backward included.
_LONGEST_IN_FP32 = 256


@dataclass(frozen=True)
class PaddedRows:
    """Tokens of several rows, padded on the right to the longest row.

    tokens: int64[n], which tokens.  places: int64[n], where these lie in the padded [rows * longest].
    padded: int64[rows * longest], the token at each place; one past the last token at places of padding.
    """

    tokens: Tensor
    places: Tensor
    padded: Tensor
    longest: int

    @staticmethod
    def of(firsts: Tensor, counts: Tensor, order: Tensor) -> PaddedRows:
        """Row i has the tokens order[firsts[i] : firsts[i] + counts[i]]."""
        rows, longest, within = counts.numel(), int(counts.max()), ragged_arange(counts)
        tokens = order[firsts.repeat_interleave(counts) + within]
        places = torch.arange(rows).repeat_interleave(counts) * longest + within
        padded = torch.full((rows * longest,), order.numel())
        padded[places] = tokens
        return PaddedRows(tokens, places, padded, longest)

    def to(self, device: torch.device) -> PaddedRows:
        """The same on `device`."""
        return replace(self, tokens=self.tokens.to(device), places=self.places.to(device), padded=self.padded.to(device))


@dataclass(frozen=True)
class KernelGroup:
    """Chunks of different sequences that go through one attention call, each a row of its batch.

    queries: the chunks, of this rank's tokens.  keys: the sequences up to the chunks' ends, of all gathered tokens.
    positions: int64[rows, longest query], of each query in its sequence, at padding that of the last real one; None where
    every chunk starts its sequence, so that queries and keys have the same places and the mask is plain causal.
    biases: what `bias` has made.
    """

    rows: int
    queries: PaddedRows
    keys: PaddedRows
    positions: Tensor | None
    biases: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> KernelGroup:
        """The same on `device`."""
        positions = None if self.positions is None else self.positions.to(device)
        return replace(self, queries=self.queries.to(device), keys=self.keys.to(device), positions=positions, biases={})

    def is_plain_causal(self, window: int | None) -> bool:
        """Whether the kernel's own causal mask is right: each query sees all keys up to its place."""
        return self.positions is None and (window is None or self.keys.longest <= window)

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[rows or 1, 1, longest query, longest key], 0 where a query may look, else -inf; one tensor for all layers.

        Every query may look at one key at least, padding included: a softmax over nothing would be NaN.
        """
        if (window, dtype) not in self.biases:
            device = self.keys.padded.device
            keys = torch.arange(self.keys.longest, device=device)
            last = (keys[None] if self.positions is None else self.positions)[:, None, :, None]
            visible = (keys <= last) if window is None else (keys <= last) & (keys > last - window)
            self.biases[window, dtype] = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
        return self.biases[window, dtype]


@dataclass
class PackedSequences(PackedSeqParams):
    """megatron's packed-sequence record, with what our attention needs, computed once for all layers. T: tokens of this rank.

    cos, sin: float32[T, head_dim], rotary tables at each token's position in its own sequence.
    groups: the kernel calls.  order: int64[T] or None, takes the groups' concatenated outputs back to packed order.
    context: the ranks that share the sequences.
    """

    cos: Tensor = field(default=None)
    sin: Tensor = field(default=None)
    groups: tuple[KernelGroup, ...] = ()
    order: Tensor | None = None
    context: Context = ALONE


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Sequence numbers, longest first, cut where a sequence is shorter than the allowed share of its group's longest."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[index] >= _MIN_LENGTH_RATIO * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _kernel_groups(cut: ContextCut, rank: int) -> list[KernelGroup]:
    """The calls for a rank's chunks. The two chunks of a sequence are never in the same one: a key lies once in a group."""
    starts, sizes = cut.starts[rank], cut.sizes[rank]
    firsts = offsets_of(sizes.flatten())[:-1].view_as(sizes)
    here, home, offsets = torch.arange(cut.held.size(1)), cut.home, offsets_of(cut.lengths)[:-1]
    groups = []
    for half in range(2):
        present = sizes[:, half].nonzero().squeeze(1)
        for members in group_by_length((starts + sizes)[present, half].tolist()):
            index = present[members]
            start, size = starts[index, half], sizes[index, half]
            queries = PaddedRows.of(firsts[index, half], size, here)
            if not start.any():
                groups.append(KernelGroup(index.numel(), queries, PaddedRows.of(offsets[index], size, home), None))
                continue
            positions = start[:, None] + torch.minimum(torch.arange(queries.longest)[None], size[:, None] - 1)
            groups.append(KernelGroup(index.numel(), queries, PaddedRows.of(offsets[index], start + size, home), positions))
    return groups


def pack_sequences(cut: ContextCut, cos: Tensor, sin: Tensor, device: torch.device, context: Context = ALONE) -> PackedSequences:
    """The record for what this rank holds of the sequences. cos, sin: tables [positions, head_dim] on `device`."""
    groups = _kernel_groups(cut, context.rank)
    source = torch.cat([group.queries.tokens for group in groups])
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
        groups=tuple(group.to(device) for group in groups),
        order=None if in_order else source.argsort().to(device),
        context=context,
    )


class _Pad(torch.autograd.Function):
    """The tokens of x [N, ...] at their padded places, zeros elsewhere. A token lies at one place, so the backward only selects."""

    @staticmethod
    def forward(ctx, x: Tensor, rows: PaddedRows) -> Tensor:
        ctx.rows, ctx.size = rows, x.size(0)
        return torch.cat((x, x.new_zeros(1, *x.shape[1:]))).index_select(0, rows.padded)

    @staticmethod
    def backward(ctx, grad: Tensor):
        back = grad.new_zeros(ctx.size, *grad.shape[1:])
        back[ctx.rows.tokens] = grad.index_select(0, ctx.rows.places)
        return back, None


class _Unpad(torch.autograd.Function):
    """The padded places' tokens, row after row; the backward pads."""

    @staticmethod
    def forward(ctx, x: Tensor, rows: PaddedRows) -> Tensor:
        ctx.rows = rows
        return x.index_select(0, rows.places)

    @staticmethod
    def backward(ctx, grad: Tensor):
        back = grad.new_zeros(ctx.rows.padded.numel(), *grad.shape[1:])
        back[ctx.rows.places] = grad
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


def _kernel_dtype(query: Tensor, longest: int) -> torch.dtype:
    """fp32 for short bf16 sequences on CPU, where torch's bf16 backward costs about 60 ms a call before any work; else query's own."""
    short_on_cpu = query.device.type == "cpu" and query.dtype == torch.bfloat16 and longest <= _LONGEST_IN_FP32
    return torch.float32 if short_on_cpu else query.dtype


def _masked_kernel_wants_all_heads(device: torch.device) -> bool:
    """Of torch's fused CUDA kernels, flash takes no mask and the memory-efficient one no grouped heads (torch 2.13's sdp_utils.cpp).

    With both, torch would fall back to a kernel that holds all scores in memory. The CPU's flash kernel takes both.
    """
    return device.type == "cuda"


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
        outputs = [self._attend(query, key, value, group) for group in packed.groups]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        out = out if packed.order is None else out.index_select(0, packed.order)
        return out.reshape(out.size(0), -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, group: KernelGroup) -> Tensor:
        """One kernel call; the group's queries, row after row, [n, heads, d]."""
        dtype = _kernel_dtype(query, group.keys.longest)

        def padded(x: Tensor, rows: PaddedRows) -> Tensor:
            return _Pad.apply(x, rows).view(group.rows, rows.longest, *x.shape[1:]).transpose(1, 2).to(dtype)

        q, k, v = padded(query, group.queries), padded(key, group.keys), padded(value, group.keys)
        causal = group.is_plain_causal(self.window)
        bias = None if causal else group.bias(self.window, dtype)
        grouped = query.size(1) != key.size(1)
        if grouped and bias is not None and _masked_kernel_wants_all_heads(query.device):
            k, v = (x.repeat_interleave(query.size(1) // key.size(1), dim=1) for x in (k, v))
            grouped = False
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=self.scale, enable_gqa=grouped)
        return _Unpad.apply(out.transpose(1, 2).reshape(-1, *query.shape[1:]), group.queries).to(query.dtype)

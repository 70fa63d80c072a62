"""The kernel calls of packed attention: which tokens go through one, and how.

Padded, where torch's fused attention wants a rectangle: sequences of similar length are padded on the right to a common
length. No real query looks at padding, and each sequence is its own batch row, so a NaN stays where it is.
Ragged, where the device has flash attention for sequences of any lengths end to end (torch.nn.attention.varlen: CUDA, 16-bit
numbers): nothing is padded, and without context parallel nothing is moved either.

Under context parallel a rank has the queries of two chunks of each sequence. A chunk looks at the keys from the start of its
sequence to the chunk's own end and to no later ones, so that work which the causal mask would throw away is done within
the chunk at most. The two chunks of a sequence are never in the same call: a key lies once in a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rlhf_mc.batch import offsets_of, ragged_arange
from rlhf_mc.parallel.context import ContextCut

# Sequences share a padded call if the shortest is at least this share of the longest: it bounds the padded work.
_MIN_LENGTH_RATIO = 0.75
# Up to this length, torch's CPU attention is faster in fp32 than in bf16, backward included.
_LONGEST_IN_FP32 = 256


def has_ragged_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention over numbers of this kind can take sequences of any lengths in one call."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PaddedRows:
    """Tokens of several rows, padded on the right to the longest row by copies of their own last tokens: so a NaN stays in its row.

    tokens: int64[n], which tokens.  places: int64[n], where these lie in the padded [rows * longest].
    padded: int64[rows * longest], the token at each place.
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
        padded = order[firsts + counts - 1].repeat_interleave(longest)
        padded[places] = tokens
        return PaddedRows(tokens, places, padded, longest)

    def to(self, device: torch.device) -> PaddedRows:
        """The same on `device`."""
        return replace(self, tokens=self.tokens.to(device), places=self.places.to(device), padded=self.padded.to(device))

    @property
    def taken(self) -> Tensor:
        """int64[rows * longest], which tokens a call takes."""
        return self.padded

    def real(self, padded: Tensor) -> Tensor:
        """[rows * longest, ...] -> [n, ...], without the padding."""
        return padded.index_select(0, self.places)


class _Take(torch.autograd.Function):
    """The rows of x [N, ...] that each call takes, for all calls at once: their gradients are added up in one tensor of x's size."""

    @staticmethod
    def forward(ctx, x: Tensor, *rows: PaddedRows | RaggedRows) -> tuple[Tensor, ...]:
        ctx.rows, ctx.size = rows, x.size(0)
        return tuple(x.index_select(0, r.taken) for r in rows)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        back = grads[0].new_zeros(ctx.size, *grads[0].shape[1:])
        for r, grad in zip(ctx.rows, grads):
            back.index_add_(0, r.tokens, r.real(grad))  # distinct tokens: what is added has one order
        return back, *(None for _ in ctx.rows)


def _take(x: Tensor, rows: Sequence[PaddedRows | RaggedRows]) -> tuple[Tensor, ...]:
    """x [N, ...] -> for each of `rows` its tokens, as its call wants them."""
    if len(rows) == 1 and rows[0].taken is None:
        return (x,)
    return _Take.apply(x, *rows)


class _Select(torch.autograd.Function):
    """x[index], of distinct rows; so the backward only puts them back."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.size = index, x.size(0)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor):
        back = grad.new_zeros(ctx.size, *grad.shape[1:])
        back[ctx.index] = grad
        return back, None


def _kernel_dtype(query: Tensor, longest: int) -> torch.dtype:
    """fp32 for short bf16 sequences on CPU, where torch's bf16 backward costs about 60 ms a call before any work; else query's own."""
    short_on_cpu = query.device.type == "cpu" and query.dtype == torch.bfloat16 and longest <= _LONGEST_IN_FP32
    return torch.float32 if short_on_cpu else query.dtype


def _masked_kernel_wants_all_heads(device: torch.device) -> bool:
    """Of torch's fused CUDA kernels, flash takes no mask and the memory-efficient one no grouped heads (torch 2.13's sdp_utils.cpp).

    With both, torch would fall back to a kernel that holds all scores in memory. The CPU's flash kernel takes both.
    """
    return device.type == "cuda"


@dataclass(frozen=True)
class PaddedCall:
    """Chunks of different sequences, each a row of a batch.

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

    def to(self, device: torch.device) -> PaddedCall:
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

    @property
    def tokens(self) -> Tensor:
        """int64[n], this rank's tokens whose queries these are, in the order of what `attend` gives."""
        return self.queries.tokens

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """What `queries` and `keys` take: query [rows * longest, heads, d], key and value [rows * longest, kv_heads, d] -> [n, heads, d]."""
        dtype = _kernel_dtype(query, self.keys.longest)

        def rectangle(x: Tensor, rows: PaddedRows) -> Tensor:
            return x.view(self.rows, rows.longest, *x.shape[1:]).transpose(1, 2).to(dtype)

        q, k, v = rectangle(query, self.queries), rectangle(key, self.keys), rectangle(value, self.keys)
        causal = self.is_plain_causal(window)
        bias = None if causal else self.bias(window, dtype)
        grouped = query.size(1) != key.size(1)
        if grouped and bias is not None and _masked_kernel_wants_all_heads(query.device):
            k, v = (x.repeat_interleave(query.size(1) // key.size(1), dim=1) for x in (k, v))
            grouped = False
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=scale, enable_gqa=grouped)
        return _Select.apply(out.transpose(1, 2).reshape(-1, *query.shape[1:]), self.queries.places).to(query.dtype)


@dataclass(frozen=True)
class RaggedRows:
    """Tokens of several rows, one row after another. tokens: int64[n], or None where these are all tokens in their order.

    offsets: int32[rows + 1], where each row begins.  longest: tokens of the longest row.
    """

    tokens: Tensor | None
    offsets: Tensor
    longest: int

    @staticmethod
    def of(firsts: Tensor, counts: Tensor, order: Tensor) -> RaggedRows:
        """Row i has the tokens order[firsts[i] : firsts[i] + counts[i]]."""
        tokens = order[firsts.repeat_interleave(counts) + ragged_arange(counts)]
        everything = tokens.numel() == order.numel() and bool((tokens == torch.arange(order.numel())).all())
        return RaggedRows(None if everything else tokens, offsets_of(counts).int(), int(counts.max()))

    def to(self, device: torch.device) -> RaggedRows:
        """The same on `device`."""
        tokens = None if self.tokens is None else self.tokens.to(device)
        return replace(self, tokens=tokens, offsets=self.offsets.to(device))

    @property
    def taken(self) -> Tensor | None:
        """int64[n], which tokens a call takes; None where all."""
        return self.tokens

    def real(self, taken: Tensor) -> Tensor:
        """[n, ...], all of it."""
        return taken


@dataclass(frozen=True)
class RaggedCall:
    """Chunks of different sequences, end to end. queries, keys: as in PaddedCall.  tokens: as there.

    Where a row has more keys than queries, its last query looks at its last key: flash attention's causal mask is aligned there.
    """

    queries: RaggedRows
    keys: RaggedRows
    tokens: Tensor

    def to(self, device: torch.device) -> RaggedCall:
        """The same on `device`."""
        return RaggedCall(self.queries.to(device), self.keys.to(device), self.tokens)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """What `queries` and `keys` take: query [n, heads, d], key and value [m, kv_heads, d] -> [n, heads, d]."""
        return varlen_attn(
            query,
            key,
            value,
            self.queries.offsets,
            self.keys.offsets,
            self.queries.longest,
            self.keys.longest,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.size(1) != key.size(1),
        )


AttentionCall = PaddedCall | RaggedCall


def attend(
    calls: Sequence[AttentionCall], query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> list[Tensor]:
    """query [T, heads, d] of this rank, key and value [T', kv_heads, d] of all gathered tokens -> of each call [n, heads, d]."""
    queries = _take(query, [call.queries for call in calls])
    keys, values = (_take(x, [call.keys for call in calls]) for x in (key, value))
    return [call.attend(*inputs, scale, window) for call, *inputs in zip(calls, queries, keys, values)]


@dataclass(frozen=True)
class _Half:
    """One chunk of each of some sequences. firsts: where it lies among the rank's tokens.  sequences: where its sequence lies among all.

    starts, sizes: of the chunk in its sequence. All int64, one entry a sequence.
    """

    firsts: Tensor
    sequences: Tensor
    starts: Tensor
    sizes: Tensor

    def __getitem__(self, index: Tensor) -> _Half:
        return _Half(self.firsts[index], self.sequences[index], self.starts[index], self.sizes[index])


def _halves(cut: ContextCut, rank: int) -> Iterator[_Half]:
    """The first chunks of the rank's sequences, and the second ones; without those that have no tokens."""
    starts, sizes = cut.starts[rank], cut.sizes[rank]
    firsts, offsets = offsets_of(sizes.flatten())[:-1].view_as(sizes), offsets_of(cut.lengths)[:-1]
    for which in range(2):
        present = sizes[:, which].nonzero().squeeze(1)
        if present.numel():
            yield _Half(firsts[:, which], offsets, starts[:, which], sizes[:, which])[present]


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Sequence numbers, longest first, cut where a sequence is shorter than the allowed share of its group's longest."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[index] >= _MIN_LENGTH_RATIO * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def padded_calls(cut: ContextCut, rank: int) -> list[AttentionCall]:
    """The calls for a rank's chunks, sequences of similar length together."""
    here, home = torch.arange(cut.held.size(1)), cut.home
    calls = []
    for half in _halves(cut, rank):
        for members in group_by_length((half.starts + half.sizes).tolist()):
            part = half[torch.tensor(members)]
            queries = PaddedRows.of(part.firsts, part.sizes, here)
            keys = PaddedRows.of(part.sequences, part.starts + part.sizes, home)
            positions = None
            if part.starts.any():
                positions = part.starts[:, None] + torch.minimum(torch.arange(queries.longest)[None], part.sizes[:, None] - 1)
            calls.append(PaddedCall(len(members), queries, keys, positions))
    return calls


def ragged_calls(cut: ContextCut, rank: int) -> list[AttentionCall]:
    """The calls for a rank's chunks: one, or two under context parallel."""
    here, home = torch.arange(cut.held.size(1)), cut.home
    calls = []
    for half in _halves(cut, rank):
        queries = RaggedRows.of(half.firsts, half.sizes, here)
        keys = RaggedRows.of(half.sequences, half.starts + half.sizes, home)
        calls.append(RaggedCall(queries, keys, here if queries.tokens is None else queries.tokens))
    return calls

"""Bytes of activations: what autograd keeps of a micro-batch on one rank between its forward and its backward. Pure; no torch.

The terms are those of this code, one for each tensor that some backward reads: our packed attention, RMSNorm and SwiGLU, megatron-core's
linear layers and vocabulary-parallel embedding, our log-probs. Tests count the storages that autograd saves and find the same
bytes. arXiv:2205.05198 has the same account for GPT layers, and what recomputing saves.

T tokens of a rank (those of the micro-batch / c), s = T/t of them where hidden states are split over t tensor ranks (sequence parallel), e bytes
a number, h hidden, f ffn width, q = heads x head_dim / t, k = key/value heads x head_dim / t; a layer keeps

    two norms        2 s (h e + 4)              their input, and 1 / rms in fp32
    linear layers    2 s h e + T q e            inputs of q k v and of the MLP, and of the attention's output
    MLP              3 T f/t e                  gate and up, and their product
    attention        padded q, k, v and output, log-sum-exp in fp32, and the rotary tables in a 16-bit dtype
    selective        in place of that: q, k, v as the linear layer gave them, and q once more where several key/value heads lie between
    full             in place of all: the layer's input, s h e
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhf_mc.config import Recompute
from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.parallel.logits_chunk import chunk_bytes

_FP32, _INT64 = 4, 8
_MASK_TYPE_BYTES = 4  # megatron's checkpoint of the attention keeps the type of its mask as a tensor


@dataclass(frozen=True)
class Tokens:
    """What one rank has of a micro-batch.

    held: its tokens, T.  answers: numbers asked of the model.
    queries, keys: places in the attention's kernel calls, padding included.  masked_keys: of these, in calls that are given a mask.
    bias: elements of these masks.
    reordered: the calls do not take the tokens in their order.
    """

    held: int
    answers: int
    queries: int
    keys: int
    masked_keys: int = 0
    bias: int = 0
    reordered: bool = False

    @staticmethod
    def even(tokens: int, longest: int, answers: int, context: int = 1, padding: float = 1.0, window: int | None = None) -> Tokens:
        """As of sequences of `longest` tokens that fill a micro-batch of `tokens`, cut over `context` ranks. padding: places a token.

        A context rank has two chunks of a sequence, and looks from each at the keys up to its end: at one and a half sequences.
        """
        sequences, held = max(1, tokens // longest), tokens // context
        if context == 1:
            masked = window is not None and window < longest
            places = round(held * padding)
            return Tokens(held, answers, places, places, places * masked, longest * longest * masked)
        chunk = -(-longest // (2 * context))
        bias = sequences * (chunk * longest + chunk * longest // 2)  # of the last rank: its late chunk sees everything
        keys = round((tokens + tokens // 2) * padding)
        return Tokens(held, -(-answers // context), round(held * padding), keys, keys, bias)

    @staticmethod
    def end_to_end(tokens: int, longest: int, answers: int, context: int = 1) -> Tokens:
        """As `even`, for a kernel that takes sequences of any lengths end to end: no padding, and no masks.

        Without context ranks it takes v as a view of the linear layer's output, of which q, k and v then stay as they were, too: one
        half more of keys and values; the output that it keeps is the one that the next linear layer does.
        """
        even = Tokens.even(tokens, longest, answers, context)
        return replace(even, keys=even.keys if context > 1 else tokens + tokens // 2, masked_keys=0, bias=0)


@dataclass(frozen=True)
class Layers:
    """What decides the activations of one role on one rank.

    dtype_bytes: of activations.  kernel_bytes: of the attention's kernel, another where short 16-bit sequences run in fp32, on CPU.
    layers: on this rank.  banned: some answers had tokens that could not be drawn (rollout.min_tokens).
    expands_keys: the masked kernel takes as many key/value heads as query heads, as those of a CUDA device do.
    """

    shape: ModelShape
    tensor: int
    layers: int
    is_first: bool
    is_last: bool
    value_head: bool
    dtype_bytes: int
    recompute: Recompute = "none"
    kernel_bytes: int | None = None
    banned: bool = False
    expands_keys: bool = False

    @property
    def queries(self) -> int:
        """Width of this rank's query heads."""
        return self.shape.num_heads * self.shape.head_dim // self.tensor

    @property
    def keys(self) -> int:
        """Width of this rank's key heads, and of its value heads."""
        return self.shape.num_kv_heads * self.shape.head_dim // self.tensor


def _attention(layers: Layers, tokens: Tokens) -> int:
    """Of one layer, inside the core attention."""
    e = layers.dtype_bytes
    kernel, head_dim = layers.kernel_bytes or e, layers.shape.head_dim
    scores = tokens.queries * layers.queries // head_dim * _FP32  # log-sum-exp
    tables = 0 if e == _FP32 else 2 * tokens.held * head_dim * e
    expanded = tokens.masked_keys * (layers.queries - layers.keys) if layers.expands_keys else 0
    return kernel * 2 * (tokens.queries * layers.queries + tokens.keys * layers.keys + expanded) + scores + tables


def _attention_input(layers: Layers, tokens: Tokens) -> int:
    """Of one layer, what its core attention is computed from again: q, k and v.

    k and v are views of the linear layer's output, and so is q where its heads lie together. Norms of q and k make new ones.
    """
    e, t, shape = layers.dtype_bytes, layers.tensor, layers.shape
    whole = layers.queries + 2 * layers.keys
    if shape.qk_norm:
        return tokens.held * e * (whole + layers.queries + layers.keys)
    copied = layers.queries if shape.num_kv_heads > t else 0
    return tokens.held * e * (whole + copied)


def _query_key_norms(layers: Layers, tokens: Tokens) -> int:
    """Of one layer: inputs of the norms of q and k, where the model has these, and 1 / rms of each head in fp32.

    The key's input is a view of the linear layer's output, so all of that is kept; the query's as well, or is a copy.
    """
    shape = layers.shape
    if not shape.qk_norm:
        return 0
    rms = (shape.num_heads + shape.num_kv_heads) // layers.tensor * _FP32
    copied = layers.queries if shape.num_kv_heads > layers.tensor else 0
    kept = 0 if layers.recompute == "selective" else layers.queries + 2 * layers.keys  # selective has it among its inputs
    return tokens.held * (layers.dtype_bytes * (kept + copied) + rms)


def layer_bytes(layers: Layers, tokens: Tokens, recompute: Recompute) -> int:
    """Bytes that one layer keeps."""
    shape, e = layers.shape, layers.dtype_bytes
    split = tokens.held // layers.tensor
    if recompute == "full":
        return split * shape.hidden * e
    norms = 2 * split * (shape.hidden * e + _FP32)
    linear = 2 * split * shape.hidden * e + tokens.held * layers.queries * e
    mlp = 3 * tokens.held * shape.ffn // layers.tensor * e
    if recompute == "selective":
        attention = _attention_input(layers, tokens) + _MASK_TYPE_BYTES
    else:
        attention = _attention(layers, tokens)
    return norms + linear + mlp + attention + _query_key_norms(layers, tokens)


def _embedding_bytes(layers: Layers, tokens: Tokens) -> int:
    """Token ids; split over tensor ranks, also which of them are another's."""
    return tokens.held * (_INT64 + (1 if layers.tensor > 1 else 0))


def _head_bytes(layers: Layers, tokens: Tokens) -> int:
    """The last norm, and what is read off its output; of logits nothing is kept."""
    shape, e, n = layers.shape, layers.dtype_bytes, tokens.answers
    split = tokens.held // layers.tensor
    norm = split * (shape.hidden * e + _FP32)
    if layers.value_head:
        return norm + split * shape.hidden * _FP32 + n * _INT64
    # Which rows answer, their hidden states (whole on each tensor rank), the target's row and whether it is here, and two numbers.
    return norm + n * (_INT64 + shape.hidden * e + _INT64 + 1 + 2 * _FP32 + (1 if layers.banned else 0))


def _shared_bytes(layers: Layers, tokens: Tokens) -> int:
    """Kept once for all layers by the attention: its masks, the rotary tables in fp32, the way back to the order of tokens."""
    if layers.recompute != "none":
        return 0
    tables = 2 * tokens.held * layers.shape.head_dim * _FP32 if layers.dtype_bytes == _FP32 else 0
    order = tokens.held * _INT64 if tokens.reordered else 0
    return tables + order + tokens.bias * (layers.kernel_bytes or layers.dtype_bytes)


def saved_bytes(layers: Layers, tokens: Tokens) -> int:
    """Bytes that autograd keeps of one micro-batch, the model's own parameters not counted."""
    kept = layers.layers * layer_bytes(layers, tokens, layers.recompute) + _shared_bytes(layers, tokens)
    kept += _embedding_bytes(layers, tokens) if layers.is_first else 0
    return kept + (_head_bytes(layers, tokens) if layers.is_last else 0)


def in_flight(stage: int, pipeline: int, micro_batches: int, chunks: int = 1) -> int:
    """Forwards without their backward yet, at most, that 1F1B leaves on a stage; with several chunks of layers a rank, of chunks.

    Those of the warm-up, and the one between (arXiv:2104.04473, section 2.2; megatron-core's schedules.get_pp_rank_microbatches).
    """
    if chunks == 1:
        return min(pipeline - stage, micro_batches)
    return min(2 * (pipeline - stage - 1) + (chunks - 1) * pipeline + 1, chunks * micro_batches)


def held_bytes(layers: Layers, tokens: Tokens, forwards: int) -> int:
    """Bytes that `forwards` micro-batches in flight hold together; of a chunk of layers, where a rank has several.

    Beside what autograd saves, the schedule holds what a stage hands on, and attention its rotary tables, masks, and places of tokens.
    The head's backward follows its forward at once, so there is one of it.
    """
    head = _head_bytes(layers, tokens) if layers.is_last else 0
    handed_on = 0 if layers.is_last else tokens.held // layers.tensor * layers.shape.hidden * layers.dtype_bytes
    tables_saved = layers.recompute == "none" and layers.dtype_bytes == _FP32
    tables = 0 if tables_saved else 2 * tokens.held * layers.shape.head_dim * _FP32
    masks = 0 if layers.recompute == "none" else tokens.bias * layers.dtype_bytes
    places = _INT64 * (tokens.held + 3 * tokens.queries + 3 * tokens.keys)
    return forwards * (saved_bytes(layers, tokens) - head + handed_on + tables + masks + places) + head


def working_bytes(layers: Layers, tokens: Tokens, trains: bool) -> int:
    """Bytes that come and go within a layer: an estimate from the largest tensors that exist together.

    A forward has hidden states, gathered ones too where they are split, gate and up, and silu(gate). A backward has what it
    computes again, the gradients of these, and that of the largest weight.
    """
    shape, e, t, held = layers.shape, layers.dtype_bytes, layers.tensor, tokens.held
    width = shape.ffn // t
    gathered = held * shape.hidden * e * (2 if t > 1 else 1)
    if not trains:
        return gathered + 3 * held * width * e
    again = layer_bytes(layers, tokens, "none") if layers.recompute == "full" else 0
    again = _attention(layers, tokens) if layers.recompute == "selective" else again
    return again + 2 * gathered + 3 * held * width * e + 2 * width * shape.hidden * e


def head_working_bytes(layers: Layers, tokens: Tokens, trains: bool) -> int:
    """Bytes that come and go at a language head: hidden states gathered, the rows that answer, and a chunk of logits.

    To train, the rows are kept anyway (`saved_bytes`), and there are gradients of them and of the output layer.
    """
    if not layers.is_last or layers.value_head:
        return 0
    shape = layers.shape
    rows = shape.padded_vocab(layers.tensor) // layers.tensor
    hidden = tokens.held + tokens.answers + (rows if trains else 0)
    return chunk_bytes(tokens.answers, rows) + hidden * shape.hidden * layers.dtype_bytes

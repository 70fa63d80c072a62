"""What vLLM takes and how long it decodes, by closed formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf_mc.medusa.shape import engine_pieces as heads_pieces
from rlhf_mc.models.hf_config import VOCAB_PADDING, ModelShape
from rlhf_mc.models.roles import Role
from rlhf_mc.pipeline.kv_cache import sequence_bytes, token_bytes
from rlhf_mc.plan.case import Case
from rlhf_mc.plan.machine import GIB

_FP32 = 4


def engine_weight_bytes(shape: ModelShape, tensor: int, dtype_bytes: int) -> int:
    """Weights of one of `tensor` ranks, padded rows of the vocabulary included; ranks share a key/value head where there are fewer."""
    d, h = shape.head_dim, shape.hidden
    queries, keys = shape.num_heads // tensor * d, max(1, shape.num_kv_heads // tensor) * d
    qkv = (queries + 2 * keys) * (h + (1 if shape.qkv_bias else 0))
    norms = 2 * h + (2 * d if shape.qk_norm else 0)
    layer = norms + qkv + h * queries + 3 * h * (shape.ffn // tensor)
    rows = -(-shape.vocab // VOCAB_PADDING) * VOCAB_PADDING // tensor
    return dtype_bytes * (shape.num_layers * layer + h + rows * h * (1 if shape.tied else 2))


def _draft_head_bytes(case: Case) -> int:
    """Weights of the draft heads on one engine rank: every block whole."""
    if case.heads is None:
        return 0
    pieces = heads_pieces(case.heads, case.settings.rollout.tensor_parallel, 0)
    return case.dtype_bytes * sum(piece.length * case.heads.hidden for piece in pieces)


@dataclass(frozen=True)
class EngineBytes:
    """Of one engine rank. working: while prompts are read or tokens drawn, an estimate; CUDA graphs included."""

    weights: int
    kv_cache: int
    working: int

    @staticmethod
    def of(case: Case) -> EngineBytes:
        """As the settings ask for it."""
        rollout, shape, e = case.settings.rollout, case.shapes[Role.ACTOR], case.dtype_bytes
        weights = engine_weight_bytes(shape, rollout.tensor_parallel, e) + _draft_head_bytes(case)
        tokens = min(case.assumed.prefill_tokens, rollout.max_running_sequences * case.workload.longest)
        layer = tokens * e * (3 * shape.hidden + 3 * shape.ffn // rollout.tensor_parallel)
        logits = 3 * rollout.max_running_sequences * shape.vocab * _FP32  # logits, log-probs, and noise
        graphs = 0 if rollout.enforce_eager or case.machine.device is None else int(case.assumed.graphs_gib * GIB)
        return EngineBytes(weights, int(rollout.kv_cache_gib * GIB), max(layer, logits) + graphs)


def sequences_at_once(case: Case) -> int:
    """Sequences that one replica decodes together: as many as it has, may run, and has KV cache for at their full length."""
    rollout, work = case.settings.rollout, case.workload
    mine = -(-work.sequences // num_replicas(case))
    room = rollout.kv_cache_gib * GIB / (work.length * _token_bytes(case))
    return max(1, min(mine, rollout.max_running_sequences, int(room)))


def num_replicas(case: Case) -> int:
    """Engines that generate side by side."""
    ranks = case.settings.rollout.engine_ranks if case.is_apart else case.num_trainers
    return max(1, ranks // case.settings.rollout.tensor_parallel)


def least_kv_cache_bytes(case: Case) -> int:
    """The least that the engine accepts: one of the longest sequences."""
    return sequence_bytes(case.shapes[Role.ACTOR], case.workload.longest, case.settings.rollout.tensor_parallel, case.dtype_bytes)


def useful_kv_cache_bytes(case: Case) -> int:
    """More than this would stay empty: all sequences that a replica may run at once, at their longest."""
    mine = min(-(-case.workload.sequences // num_replicas(case)), case.settings.rollout.max_running_sequences)
    return mine * least_kv_cache_bytes(case)


def _token_bytes(case: Case) -> int:
    return token_bytes(case.shapes[Role.ACTOR], case.settings.rollout.tensor_parallel, case.dtype_bytes)


def generate_seconds(case: Case) -> float:
    """Decoding and reading prompts, on the busiest replica; draft heads are not counted on, and all responses as long as their mean.

    A step reads the rank's weights and the keys and values of its sequences (memory), multiplies (FLOPs), adds up twice a layer over
    the replica's ranks, and starts each layer's kernels: it cannot be faster than the first two or than the last.
    """
    work, shape, assumed = case.workload, case.shapes[Role.ACTOR], case.assumed
    tensor, device = case.settings.rollout.tensor_parallel, case.machine.device
    running = sequences_at_once(case)
    rounds = math.ceil(-(-work.sequences // num_replicas(case)) / running)
    weights = engine_weight_bytes(shape, tensor, case.dtype_bytes)
    seen = running * (work.prompt + work.response / 2) * _token_bytes(case)
    memory = (weights + seen) / (device.hbm_gbs * 1e9 * assumed.memory_efficiency)
    flops = 2 * shape.num_params / tensor / (device.tflops * 1e12 * assumed.matmul_efficiency)
    across = 0.0
    if tensor > 1:
        message = 2 * running * shape.hidden * case.dtype_bytes * (tensor - 1) / tensor
        rate = case.machine.bandwidth(tensor) * assumed.link_efficiency
        across = 2 * shape.num_layers * (assumed.all_reduce_seconds + message / rate)
    start = shape.num_layers * (assumed.eager_layer_seconds if case.settings.rollout.enforce_eager else assumed.graph_layer_seconds)
    step = max(memory, flops * running, start) + across
    prefill = running * work.prompt * flops
    return rounds * (work.response * step + prefill)

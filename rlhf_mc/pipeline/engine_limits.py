"""What an engine needs of a model and of a machine, checked before vLLM starts, which would fail later, on one rank, or not at all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from rlhf_mc.config import ConfigError, Rollout
from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.parallel.grids import RolloutGrid
from rlhf_mc.pipeline.kv_cache import sequence_bytes

GIB = 2**30
_DTYPE_BYTES = {"fp32": 4, "bf16": 2}


def stop_token_ids(model_path: str, tokenizer_eos_id: int | None = None) -> list[int]:
    """Token ids that end a response: those of generation_config.json, else of config.json, and the tokenizer's.

    Raises ConfigError where there is none: every response would run to rollout.max_tokens.
    """
    declared: Any = None
    for name in ("generation_config.json", "config.json"):
        file = Path(model_path) / name
        if declared is None and file.exists():
            declared = json.loads(file.read_text()).get("eos_token_id")
    ids = {tokenizer_eos_id, *(declared if isinstance(declared, list) else [declared])} - {None}
    if not ids:
        raise ConfigError(f"{model_path}: no eos_token_id in generation_config.json, config.json or the tokenizer; add one")
    return sorted(ids)


def check_settings(shape: ModelShape, settings: Rollout, dtype: str, max_prompt_tokens: int) -> None:
    """Raise ConfigError where the rollout settings do not fit the model. No collective; vLLM is not imported."""
    max_model_len = max_prompt_tokens + settings.max_tokens
    if max_model_len > shape.max_positions:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_tokens = {max_model_len} exceeds the {shape.max_positions} positions "
            "(max_position_embeddings) of actor.path; lower one of the two"
        )
    if shape.num_heads % settings.tensor_parallel:
        raise ConfigError(
            f"rollout.tensor_parallel: {settings.tensor_parallel} does not divide the {shape.num_heads} attention heads "
            "of actor.path; choose a divisor"
        )
    needed = sequence_bytes(shape, max_model_len, settings.tensor_parallel, _DTYPE_BYTES[dtype])
    if needed > settings.kv_cache_gib * GIB:
        raise ConfigError(
            f"rollout.kv_cache_gib: {settings.kv_cache_gib} GiB on each rank cannot hold one sequence of {max_model_len} tokens "
            f"(data.max_prompt_tokens + rollout.max_tokens); set it to {math.ceil(needed / GIB * 1000) / 1000} or more, "
            "or shorten the sequences"
        )


def check_memory(settings: Rollout, grid: RolloutGrid) -> None:
    """Collective over all ranks: raise ConfigError on every rank where the KV cache does not fit the free memory of any."""
    cuda = torch.cuda.is_available()
    local_ranks = 1 if cuda else int(os.environ.get("LOCAL_WORLD_SIZE", grid.world_size))
    free = torch.cuda.mem_get_info()[0] if cuda else psutil.virtual_memory().available
    shortage = None
    if local_ranks * settings.kv_cache_gib * GIB > free:
        shortage = (
            f"rank {grid.rank}: {local_ranks} x rollout.kv_cache_gib = {local_ranks * settings.kv_cache_gib:.3g} GiB "
            f"of KV cache on this {'device' if cuda else 'host'}, where {free / GIB:.3g} GiB are free; "
            "lower rollout.kv_cache_gib or free memory"
        )
    shortages: list[str | None] = [None] * grid.world_size
    dist.all_gather_object(shortages, shortage)
    if any(shortages):
        raise ConfigError(next(message for message in shortages if message))

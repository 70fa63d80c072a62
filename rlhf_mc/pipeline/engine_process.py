"""What vLLM does to the process that it shares with the trainer: its environment before, and everything put back after."""

from __future__ import annotations

import contextlib
import os
import random
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

_SHARED_MEMORY = Path("/dev/shm")


def agreed_ident() -> str:
    """Collective over all ranks: a name that no other job on this host uses."""
    ident = [f"rlhf_mc-{uuid.uuid4().hex[:12]}"]
    dist.broadcast_object_list(ident, src=0)
    return ident[0]


def forget_shared_memory_names(ident: str) -> None:
    """Collective over all ranks: unlink the segments that all have attached, so that even a killed run leaves no file."""
    dist.barrier()
    for segment in _SHARED_MEMORY.glob(f"{ident}-*"):
        segment.unlink(missing_ok=True)


@contextlib.contextmanager
def vllm_environment(cuda: bool) -> Iterator[None]:
    """What vLLM reads at import and start. What it overwrites on the way for its own children is put back."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override rollout.kv_cache_gib
    if not cuda:
        import torch._dynamo

        torch._dynamo.config.disable = True  # the first sampling would compile a small function for up to 20 s
    overwritten = {name: os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LD_PRELOAD")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for name, value in overwritten.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def rng_kept() -> Iterator[None]:
    """vLLM seeds the process's generators at start, and draws from torch's while sampling on CPU: put them back."""
    python, numpy_state = random.getstate(), numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def torch_threads_kept() -> Iterator[None]:
    """On CPU vLLM replaces torch.set_num_threads by a function that does nothing: the trainer gets the real one back."""
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)

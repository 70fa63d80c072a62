"""Residue: what is left on the device when all roles are off it, by owner; and giving back what can be given back."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import parallel_state

from rlhf_mc.offload.text import aligned, readable


def residue(states: int, host_copies: int, device: torch.device) -> dict[str, int]:
    """Bytes by owner, of which `states` (on the device) and `host_copies` are known already.

    Together they are the driver's own figure for this device; on CPU, the resident memory of this process.
    A GPU's driver counts all processes on the device; with one process a device, what torch does not know of belongs to
    communicators, CUDA contexts, and libraries.
    """
    owners = {"states of roles": states, "megatron's global buffers": _global_buffer_bytes()}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        owners["other tensors (engine, batches, cuBLAS workspaces)"] = allocated - sum(owners.values())
        owners["cached by torch's allocator"] = reserved - allocated
        owners["outside torch (communicators, contexts, libraries)"] = total - free - reserved
    else:
        owners["host copies"] = host_copies
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        owners["everything else of the process (libraries, engine, freed but kept)"] = resident - sum(owners.values())
    return owners


def release_residue(device: torch.device) -> None:
    """Gives back what is not needed while the roles are off: megatron's scratch buffers, cuBLAS workspaces, torch's cache.

    Communicators keep their memory: no NCCL that torch 2.13 exposes can suspend one.
    """
    parallel_state.get_global_memory_buffer().buffer.clear()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def residue_table(owners: dict[str, int]) -> str:
    """`residue` for people to read."""
    rows = [("left on the device", "bytes"), *((owner, readable(num_bytes)) for owner, num_bytes in owners.items())]
    return aligned([*rows, ("all", readable(sum(owners.values())))])


def _global_buffer_bytes() -> int:
    return sum(tensor.nbytes for tensor in parallel_state.get_global_memory_buffer().buffer.values())

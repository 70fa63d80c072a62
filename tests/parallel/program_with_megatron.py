"""A process that trains a megatron model on the CPU, and says what it changed of torch: `program_with_megatron.py MODEL_DIR`.

Prints one JSON object: changed, the names that are other objects than before megatron was imported; on_cpu, how a tensor
names its type; grad_norm of the training step.
"""

from __future__ import annotations

import json
import sys
import types

import torch
import torch._dynamo  # it wraps torch.manual_seed, whoever imports it
import torch.distributed as dist

_HOLDERS = {
    "torch": torch,
    "torch.cuda": torch.cuda,
    "torch.Tensor": torch.Tensor,
    "torch.nn.Module": torch.nn.Module,
    "torch.nn.functional": torch.nn.functional,
    "torch.optim.AdamW": torch.optim.AdamW,
    "torch.distributed": dist,
}


def members() -> dict[str, object]:
    """What others call of torch, by name: functions, methods and classes."""
    return {
        f"{holder}.{name}": value
        for holder, where in _HOLDERS.items()
        for name, value in vars(where).items()
        if callable(value) and not isinstance(value, types.ModuleType)
    }


def train(directory: str) -> dict[str, float]:
    """One training step of a one-rank world."""
    from models.on_ranks import make_role, train_step
    from tiny_models import random_batch

    from rlhf_mc.config import Optim, Settings, Trainer
    from rlhf_mc.parallel.world import join_world, leave_world

    world = join_world(Settings(trainer=Trainer(device="cpu", dtype="bf16")))
    grad_norm = train_step(make_role(world, directory, optim=Optim(), dtype="bf16"), random_batch([9, 4, 12]), lr=1e-3)
    leave_world()
    return {"grad_norm": grad_norm}


def main() -> None:
    before = members()
    result = train(sys.argv[1])
    after = members()
    changed = [name for name, value in before.items() if after.get(name) is not value]
    print(json.dumps({"changed": changed, "on_cpu": str(torch.empty(1).type()), **result}))


if __name__ == "__main__":
    main()

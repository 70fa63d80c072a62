"""bf16 params with fp32 main params: small steps are not lost, and loading reaches the main params."""

from __future__ import annotations

import pytest
import torch
from ranks import Layout, RankPool
from tiny_models import random_batch

BATCH = random_batch([9, 4, 12])
OPTIMIZERS = pytest.mark.parametrize("distributed_optimizer", [False, True], ids=["plain", "distributed"])


@OPTIMIZERS
def test_steps_below_the_resolution_of_bf16_accumulate(ranks: RankPool, language_model, distributed_optimizer: bool) -> None:
    """Norm weights are about 1, where neighbouring bf16 numbers are 2^-8 apart or more; the steps are about 1e-4."""
    arguments = dict(directory=language_model("qwen2"), batch=BATCH, lr=1e-4, num_steps=80)
    history = ranks.run("models.on_ranks:small_steps", distributed_optimizer=distributed_optimizer, **arguments)[0]
    params, mains = (torch.stack(values) for values in zip(*history))
    mains = mains.view(params.shape)
    assert params.dtype == torch.bfloat16 and mains.dtype == torch.float32
    moves = mains.diff(dim=0)
    assert (moves[0] != 0).all(), "every main param moves at each step"
    assert torch.equal(params[:-1], (params[:-1].float() + moves).bfloat16()), "no single step could move a bf16 param"
    assert torch.equal(params, mains.bfloat16()), "params are the rounded main params"
    moved = (params[-1] != params[0]).float().mean()
    assert moved > 0.5, f"only {moved:.0%} of the bf16 params moved in 80 steps"


@OPTIMIZERS
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [Layout(), Layout(data=2)], ids=str)
def test_a_step_with_lr_0_changes_nothing(
    ranks: RankPool, language_model, layout: Layout, dtype: str, distributed_optimizer: bool
) -> None:
    """Loading reaches the fp32 main params; otherwise a step would write back what they held before."""
    arguments = dict(directory=language_model("llama"), batch=BATCH, dtype=dtype, distributed_optimizer=distributed_optimizer)
    for answer in ranks.run("models.on_ranks:step_with_zero_lr", layout, **arguments):
        assert answer["grad_norm"] > 0
        different = [name for name, tensor in answer["before"].items() if not tensor.equal(answer["after"][name])]
        assert not different

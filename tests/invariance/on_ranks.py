"""What the invariance tests run on ranks (see tests/ranks.py): training on one saved batch."""

from __future__ import annotations

from typing import Any

import torch
from models.on_ranks import exported, make_role
from torch import Tensor

from rlhf_mc.batch import SequenceBatch
from rlhf_mc.config import MicroBatch, Optim, Recompute
from rlhf_mc.models.heads import TokenLogprobs
from rlhf_mc.models.loss import Loss, LossSum
from rlhf_mc.models.passes import accumulate_gradients, update, zero_gradients
from rlhf_mc.parallel.packing import PackedMicrobatch
from rlhf_mc.parallel.world import World
from rlhf_mc.stages.reward_model import preference_loss


def weighted_loss(wanted: Tensor) -> Loss:
    """Of a language head: -wanted . log-probs - entropy / 100.  Of a value head: (values - wanted)^2 / 2.

    Means over all answers of the batch.
    wanted: float32, one number for each answer of the batch; so it shows where an answer goes to the wrong place.
    """

    def of(answers: TokenLogprobs | Tensor, microbatch: PackedMicrobatch) -> LossSum:
        mine = wanted[microbatch.slots]
        if isinstance(answers, TokenLogprobs):
            loss = -(mine * answers.logprobs).sum() - 0.01 * answers.entropy.sum()
        else:
            loss = 0.5 * (answers - mine).square().sum()
        return LossSum(loss / wanted.numel(), {"loss": loss / wanted.numel()})

    return Loss(("loss",), of)


def train(
    world: World,
    directory: str,
    head: str,
    batch: SequenceBatch,
    wanted: Tensor,
    budget: MicroBatch,
    distributed_optimizer: bool,
    optim: dict[str, Any],
    num_steps: int,
    dtype: str = "fp32",
    recompute: Recompute = "none",
) -> dict[str, Any]:
    """`num_steps` on the same batch: the loss and the gradient norm of each, and the weights afterwards, by Hugging Face name."""
    model = make_role(world, directory, head, Optim(**optim), dtype, distributed_optimizer, recompute)
    losses, grad_norms = [], []
    for _ in range(num_steps):
        zero_gradients(model)
        losses.append(accumulate_gradients(model, batch, "predicted", budget, weighted_loss(wanted))["loss"])
        grad_norms.append(update(model, optim["lr"]))
    return {"losses": torch.tensor(losses), "grad_norms": torch.tensor(grad_norms), "weights": exported(model)}


def train_on_pairs(
    world: World, directory: str, batch: SequenceBatch, budget: MicroBatch, optim: dict[str, Any], num_steps: int
) -> dict[str, Any]:
    """`num_steps` of a reward model on the same preference pairs: all sums and the gradient norm of each, and the weights afterwards."""
    model = make_role(world, directory, "value", Optim(**optim))
    loss, _ = preference_loss(batch)
    sums, grad_norms = [], []
    for _ in range(num_steps):
        zero_gradients(model)
        sums.append(list(accumulate_gradients(model, batch, "last", budget, loss, together=2).values()))
        grad_norms.append(update(model, optim["lr"]))
    return {"sums": torch.tensor(sums), "grad_norms": torch.tensor(grad_norms), "weights": exported(model)}

"""Supervised fine-tuning on prompt/response pairs: torchrun -m rlhf_mc.stages.sft --config FILE [key=value ...]

With medusa.enabled, draft heads are trained too: beside the model in one forward (medusa.joint_weight; Medusa-2 of arXiv:2401.10774), or
alone, on a model that stays as it is (Medusa-1).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_mc.algorithms.losses import language_model_loss
from rlhf_mc.batch import SequenceBatch
from rlhf_mc.launch import run_program
from rlhf_mc.models.loss import Loss, LossSum

if TYPE_CHECKING:
    from rlhf_mc.config import Settings
    from rlhf_mc.models.heads import TokenLogprobs
    from rlhf_mc.parallel.packing import PackedMicrobatch
    from rlhf_mc.stages.supervised import Objective


def response_loss(batch: SequenceBatch) -> tuple[Loss, int]:
    """Negative log-likelihood of the tokens in loss_mask, over their global count."""
    count = int(batch.loss_mask.sum())

    def of(answers: TokenLogprobs, packed: PackedMicrobatch) -> LossSum:
        sums = language_model_loss(answers.logprobs, torch.ones_like(packed.targets, dtype=torch.bool))
        return LossSum(sums.loss / count, {"loss": sums.stats["lm_loss"]})

    return Loss(("loss",), of), count


def held_out_loss(logprobs: Tensor) -> dict[str, float]:
    """Negative log-likelihood a token, and its exponential, from the log-probs of all held-out response tokens."""
    loss = -logprobs.mean().item()
    return {"val/loss": loss, "val/perplexity": math.exp(loss)}


def responses() -> Objective:
    """To write the responses of prompt/response pairs."""
    from rlhf_mc.data import SupervisedExamples
    from rlhf_mc.models.role import Role
    from rlhf_mc.stages.supervised import Objective

    return Objective(Role.ACTOR, SupervisedExamples, "language", "predicted", response_loss, held_out_loss)


def sft(settings: Settings) -> None:
    """Collective over all ranks: the whole program."""
    from rlhf_mc.stages.supervised import fit

    fit(settings, responses())


if __name__ == "__main__":
    run_program("sft", sft)

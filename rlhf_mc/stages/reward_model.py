"""Reward-model training on chosen/rejected pairs: torchrun -m rlhf_mc.stages.reward_model --config FILE [key=value ...]"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rlhf_mc.algorithms.losses import pairwise_loss
from rlhf_mc.batch import SequenceBatch
from rlhf_mc.launch import run_program
from rlhf_mc.models.loss import Loss, LossSum

if TYPE_CHECKING:
    from rlhf_mc.config import Settings
    from rlhf_mc.parallel.packing import PackedMicrobatch
    from rlhf_mc.stages.supervised import Objective


def preference_loss(batch: SequenceBatch) -> tuple[Loss, int]:
    """Bradley-Terry loss of the batch's pairs (sequences 2i chosen, 2i + 1 rejected), over their global count."""
    count = len(batch) // 2

    def of(scores: Tensor, packed: PackedMicrobatch) -> LossSum:
        sums = pairwise_loss(scores[0::2], scores[1::2])
        return LossSum(sums.loss / count, sums.stats)

    return Loss(("loss", "accuracy", "margin"), of), count


def held_out_accuracy(scores: Tensor) -> dict[str, float]:
    """Share of held-out pairs whose chosen response scores higher (a tie is wrong), mean loss, and mean margin."""
    sums = pairwise_loss(scores[0::2], scores[1::2])
    return {f"val/{name}": (total / sums.count).item() for name, total in sums.stats.items()}


def preferences() -> Objective:
    """To score the chosen response of each pair higher."""
    from rlhf_mc.data import PreferencePairs
    from rlhf_mc.models.role import Role
    from rlhf_mc.stages.supervised import Objective

    return Objective(Role.REWARD, PreferencePairs, "value", "last", preference_loss, held_out_accuracy)


def reward_model(settings: Settings) -> None:
    """Collective over all ranks: the whole program."""
    from rlhf_mc.stages.supervised import fit

    fit(settings, preferences())


if __name__ == "__main__":
    run_program("reward_model", reward_model)

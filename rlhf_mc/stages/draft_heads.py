"""Draft heads as the programs meet them: built beside an actor, saved, and the steps and numbers of supervised training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from rlhf_mc.algorithms.schedule import lr_at
from rlhf_mc.batch import SequenceBatch
from rlhf_mc.config import Settings
from rlhf_mc.medusa.drafter import DraftModel, build_drafter, update_heads
from rlhf_mc.medusa.files import load_heads
from rlhf_mc.medusa.hidden_states import HiddenStates
from rlhf_mc.medusa.loss import head_metrics
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.medusa.training import joint_loss, measure_heads, step_heads
from rlhf_mc.models.loss import Loss
from rlhf_mc.models.passes import score, zero_gradients
from rlhf_mc.models.role import Role, RoleModel
from rlhf_mc.offload import Part
from rlhf_mc.tracking import Comparison

if TYPE_CHECKING:
    from rlhf_mc.stages.start import Run


def build_heads(settings: Settings, actor: RoleModel, trained: bool, say: Callable[[str], None]) -> DraftModel:
    """Collective over all ranks. The draft heads on an actor that is on the device; the heads themselves, too.

    `medusa.path`, if any, has passed `check_heads`. say: gets a sentence about them.
    """
    section, shape = settings.medusa, HeadsShape.of(settings.medusa, actor.shape)
    share = shape.num_params / actor.shape.num_params
    say(
        f"medusa: {shape.num_heads} draft heads, {shape.num_params:,} parameters ({share:.1%} of the actor's), "
        f"{f'weights from {section.path}' if section.path else 'new'}, {'trained' if trained else 'frozen'}"
    )
    return build_drafter(settings, actor, trained, load_heads(section.path, shape) if section.path else None)


def finish_heads(run: Run, learned: list[dict[str, float]]) -> None:
    """Collective over all ranks. Ends a run of draft heads alone: they are saved, and the first rollout is compared with the last.

    learned: metrics of each iteration's training.
    """
    output = Path(run.settings.trainer.output_dir)
    with run.clock.stage("save"), run.residency.on_device(Role.MEDUSA, Part.PARAMS):
        run.drafter.save(output / "medusa", run.actor.shape, run.actor.source)
    if learned:
        names = ["medusa/loss", *(f"medusa/head_{k}/accuracy" for k in range(1, run.drafter.shape.num_heads + 1))]
        rows = [Comparison(name.removeprefix("medusa/"), learned[0][name], learned[-1][name]) for name in names]
        run.tracker.before_and_after("Heads on the first and the last rollout, as they were trained on it", rows)
    run.tracker.say(f"the actor stays as it is in {run.settings.actor.path}, the draft heads are in {(output / 'medusa').resolve()}")


class SupervisedHeads:
    """The heads' part of supervised training: with the model in one forward (medusa.joint_weight), or alone on a frozen model.

    total: optimizer steps of the program.
    """

    def __init__(self, settings: Settings, model: RoleModel, drafter: DraftModel, total: int) -> None:
        self._settings, self._model, self._drafter, self._total = settings, model, drafter, total

    def loss_beside(self, batch: SequenceBatch) -> Loss:
        """For the model's `accumulate_gradients` on `batch`, which `update_beside` follows: the heads' loss (Medusa-2)."""
        zero_gradients(self._drafter)
        return joint_loss(self._drafter, self._model, batch, self._settings.medusa)

    def update_beside(self, sums: dict[str, float], step: int) -> dict[str, float]:
        """Collective over all ranks. The optimizer step that uses the gradients of `loss_beside`; medusa/... metrics.

        sums: what `accumulate_gradients` returned.
        """
        lr = self._learning_rate(step)
        return self._metrics(sums, update_heads(self._drafter, lr), lr)

    def step_alone(self, batch: SequenceBatch, step: int) -> dict[str, float]:
        """Collective over all ranks. One optimizer step on what the frozen model makes of `batch` (Medusa-1); medusa/... metrics."""
        hidden, _ = self._scored(batch)
        (taken,), lr = hidden.taken(), self._learning_rate(step)
        sums, grad_norm = step_heads(self._drafter, self._model, hidden, taken, self._settings.medusa.loss_decay, lr)
        return self._metrics(sums, grad_norm, lr)

    def measure(self, held_out: SequenceBatch) -> tuple[Tensor, dict[str, float]]:
        """Collective over all ranks. The model's log-probs of held-out tokens, and of the same pass val/medusa_head_{k}_accuracy."""
        hidden, logprobs = self._scored(held_out)
        measured = measure_heads(self._drafter, self._model, hidden, self._settings.medusa.loss_decay)
        heads = range(1, self._drafter.shape.num_heads + 1)
        return logprobs, {f"val/medusa_head_{k}_accuracy": measured[f"medusa/head_{k}/accuracy"] for k in heads}

    def save(self, directory: Path, model_directory: str | Path) -> None:
        """Collective over all ranks. To `directory`/medusa; the model is saved in `model_directory`."""
        self._drafter.save(directory / "medusa", self._model.shape, model_directory)

    def _scored(self, batch: SequenceBatch) -> tuple[HiddenStates, Tensor]:
        """The rows of a forward pass of `batch`, and its log-probs."""
        hidden = HiddenStates(self._model.world, self._drafter.shape.num_heads, steps=[range(len(batch))])
        receiver = hidden.receiver(range(len(batch)))
        return hidden, score(self._model, batch, "predicted", self._settings.supervised.micro_batch, hand_over=receiver)

    def _learning_rate(self, step: int) -> float:
        return lr_at(step, self._total, self._settings.medusa.optim)

    def _metrics(self, sums: dict[str, float], grad_norm: float, lr: float) -> dict[str, float]:
        metrics = head_metrics(sums, self._drafter.shape.num_heads, self._settings.medusa.loss_decay)
        return metrics | {"medusa/grad_norm": grad_norm, "medusa/lr": lr}

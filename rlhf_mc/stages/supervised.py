"""The loop that supervised fine-tuning and reward-model training share: steps over rows, held-out numbers, a saved model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from rlhf_mc.algorithms.schedule import lr_at
from rlhf_mc.batch import SequenceBatch
from rlhf_mc.config import Settings
from rlhf_mc.data import Encoder, PreferencePairs, SupervisedExamples, load_tokenizer, read_rows
from rlhf_mc.models.hf_config import read_shape
from rlhf_mc.models.loss import Loss
from rlhf_mc.models.optimizer import kernels_in_use
from rlhf_mc.models.passes import accumulate_gradients, score, update, zero_gradients
from rlhf_mc.models.role import Role, RoleModel, build_role
from rlhf_mc.parallel.packing import Asked
from rlhf_mc.parallel.world import join_world
from rlhf_mc.tracking import Comparison, StageClock, Tracker

Source = SupervisedExamples | PreferencePairs


@dataclass(frozen=True)
class Objective:
    """What is learnt, and from what.

    rows: the kind of rows; those of a pair are neighbours.  head, asked: the model's head, and which numbers it gives.
    loss: of one batch, over its global count, and that count.  measure: held-out numbers by name, from the head's numbers.
    """

    role: Role
    rows: type[Source]
    head: Literal["language", "value"]
    asked: Asked
    loss: Callable[[SequenceBatch], tuple[Loss, int]]
    measure: Callable[[Tensor], dict[str, float]]

    @property
    def together(self) -> int:
        """Neighbouring sequences that must share a micro-batch."""
        return 2 if self.rows is PreferencePairs else 1


def _read(objective: Objective, files: list[str], key: str, settings: Settings) -> Source | None:
    if not files:
        return None
    section = settings.supervised
    tokenizer = load_tokenizer(section.path, settings.trainer.trust_remote_code)
    return objective.rows(
        read_rows(files, key),
        Encoder(tokenizer, chat_template=settings.data.chat_template),
        batch_size=section.batch_size,
        max_tokens=section.max_tokens,
        seed=settings.trainer.seed,
        shuffle=settings.data.shuffle,
    )


def fit(settings: Settings, objective: Objective) -> None:
    """Collective over all ranks, once model and data were checked: the whole program.

    Logs every step, measures on held-out rows, saves to trainer.output_dir/model.
    """
    section, key = settings.supervised, "supervised.path"
    read_shape(section.path, key).check_layout(settings.parallel.tensor, settings.parallel.pipeline, key)
    source = _read(objective, settings.data.train, "data.train", settings)
    held_out = _read(objective, settings.data.validation, "data.validation", settings)
    world = join_world(settings)
    total = min(source.num_steps(section.epochs), section.max_steps or source.num_steps(section.epochs))
    with Tracker(settings, world.rank, total) as tracker:
        tracker.say(f"data.train: {source.report}")
        tracker.say(f"{world.size} ranks on {world.device.type}, {settings.trainer.dtype}; {kernels_in_use(world.device)}; {total} steps")
        model = build_role(objective.role, objective.head, section.path, settings, world, section.optim)
        held_out = held_out.all() if held_out else None
        before = _measure(model, held_out, objective, settings)
        clock = StageClock(world.device)
        for step in range(total):
            batch = source.batch(step)
            with clock.stage("update"):
                metrics = _take_step(model, batch, objective, settings, step, total)
            if section.evaluate_every and (step + 1) % section.evaluate_every == 0:
                with clock.stage("evaluate"):
                    metrics |= _measure(model, held_out, objective, settings)
            tracker.log(step, metrics | clock.metrics(int(batch.lengths.sum()), world.size))
        target = Path(settings.trainer.output_dir) / "model"
        model.save(str(target))
        after = _measure(model, held_out, objective, settings)
        if held_out:
            rows = [Comparison(name.removeprefix("val/"), before[name], after[name]) for name in before]
            tracker.before_and_after(f"{len(held_out)} held-out sequences", rows)
        tracker.say(f"the model is in {target.resolve()}")


def _take_step(model: RoleModel, batch: SequenceBatch, objective: Objective, settings: Settings, step: int, total: int) -> dict[str, float]:
    """Collective over all ranks. One optimizer step; train/... metrics."""
    section = settings.supervised
    loss, count = objective.loss(batch)
    zero_gradients(model)
    sums = accumulate_gradients(model, batch, objective.asked, section.micro_batch, loss, together=objective.together)
    lr = lr_at(step, total, section.optim)
    grad_norm = update(model, lr)
    return {f"train/{name}": total / count for name, total in sums.items()} | {"train/grad_norm": grad_norm, "train/lr": lr}


def _measure(model: RoleModel, held_out: SequenceBatch | None, objective: Objective, settings: Settings) -> dict[str, float]:
    """Collective over all ranks. val/... of the held-out rows; {} without them."""
    if held_out is None:
        return {}
    return objective.measure(score(model, held_out, objective.asked, settings.supervised.micro_batch))

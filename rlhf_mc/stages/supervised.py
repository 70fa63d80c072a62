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
from rlhf_mc.medusa.files import check_heads
from rlhf_mc.models.hf_config import read_shape
from rlhf_mc.models.loss import Loss
from rlhf_mc.models.optimizer import kernels_in_use
from rlhf_mc.models.passes import accumulate_gradients, score, update, zero_gradients
from rlhf_mc.models.role import Role, RoleModel, build_role
from rlhf_mc.parallel.packing import Asked
from rlhf_mc.parallel.world import World, join_world
from rlhf_mc.reliability import Guard, fault_of_norm
from rlhf_mc.stages.draft_heads import SupervisedHeads, build_heads
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


def _check_model(settings: Settings) -> None:
    """Raises ConfigError for a model that cannot be split as asked, or heads that are not its own. Reads no weights; no collective."""
    section, medusa, key = settings.supervised, settings.medusa, "supervised.path"
    shape = read_shape(section.path, key)
    shape.check_layout(settings.parallel, key)
    if medusa.enabled and medusa.path:
        check_heads(medusa.path, medusa, shape)


def fit(settings: Settings, objective: Objective) -> None:
    """Collective over all ranks, once model and data were checked: the whole program.

    Logs every step, measures on held-out rows, saves what was trained: trainer.output_dir/model, and /medusa with draft heads.
    """
    section = settings.supervised
    _check_model(settings)
    source = _read(objective, settings.data.train, "data.train", settings)
    held_out = _read(objective, settings.data.validation, "data.validation", settings)
    world = join_world(settings)
    total = min(source.num_steps(section.epochs), section.max_steps or source.num_steps(section.epochs))
    with Tracker(settings, world.rank, total) as tracker:
        tracker.say(f"data.train: {source.report}")
        tracker.say(f"{world.size} ranks on {world.device.type}, {settings.trainer.dtype}; {kernels_in_use(world.device)}; {total} steps")
        learner = build_learner(settings, objective, world, total, tracker.say)
        held_out = held_out.all() if held_out else None
        before = learner.measure(held_out)
        clock, guard = StageClock(world.device), Guard(settings.guard)
        for step in range(total):
            batch = source.batch(step)
            with clock.stage("update"):
                metrics = learner.take_step(batch, step)
            guard.judged("the model", fault_of_step(metrics, settings))
            if section.evaluate_every and (step + 1) % section.evaluate_every == 0:
                with clock.stage("evaluate"):
                    metrics |= learner.measure(held_out)
            tracker.log(step, metrics | clock.metrics(int(batch.lengths.sum()), world.size))
        saved = learner.save(Path(settings.trainer.output_dir))
        after = learner.measure(held_out)
        if held_out:
            rows = [Comparison(name.removeprefix("val/"), before[name], after[name]) for name in before]
            tracker.before_and_after(f"{len(held_out)} held-out sequences", rows)
        tracker.say(saved)


def fault_of_step(metrics: dict[str, float], settings: Settings) -> str | None:
    """Why the model, or its draft heads, were not stepped, by the gradient norms; None: they were."""
    of_model = fault_of_norm(metrics.get("train/grad_norm", 0.0), settings.guard.max_grad_norm)
    return of_model or fault_of_norm(metrics.get("train/medusa/grad_norm", 0.0))


def build_learner(settings: Settings, objective: Objective, world: World, total: int, say: Callable[[str], None]) -> Learner:
    """Collective over all ranks. The model, frozen where draft heads alone are trained, and the heads, if any.

    total: optimizer steps of the program.  say: gets a sentence about the heads.
    """
    section = settings.supervised
    alone = settings.trains_heads_alone
    model = build_role(objective.role, objective.head, section.path, settings, world, None if alone else section.optim)
    heads = None
    if settings.medusa.enabled:
        heads = SupervisedHeads(settings, model, build_heads(settings, model, True, say), total)
    if alone:
        say("medusa.joint_weight=null: the model is frozen, and only its draft heads are trained")
    return Learner(settings, objective, model, heads, total)


@dataclass(frozen=True)
class Learner:
    """What learns, in steps numbered from 0. heads: draft heads on the model, None without."""

    settings: Settings
    objective: Objective
    model: RoleModel
    heads: SupervisedHeads | None
    total: int

    def take_step(self, batch: SequenceBatch, step: int) -> dict[str, float]:
        """Collective over all ranks. One optimizer step of all that learns; train/... metrics."""
        metrics = self.heads.step_alone(batch, step) if self.settings.trains_heads_alone else self._step_of_model(batch, step)
        return {f"train/{name}": value for name, value in metrics.items()}

    def _step_of_model(self, batch: SequenceBatch, step: int) -> dict[str, float]:
        """With draft heads, these take theirs on the same forward."""
        model, section, together = self.model, self.settings.supervised, self.objective.together
        loss, count = self.objective.loss(batch)
        beside = self.heads.loss_beside(batch) if self.heads else None
        zero_gradients(model)
        sums = accumulate_gradients(model, batch, self.objective.asked, section.micro_batch, loss, together=together, beside=beside)
        lr = lr_at(step, self.total, section.optim)
        metrics = {name: sums[name] / count for name in loss.names} | {"grad_norm": update(model, lr, self.settings.guard.max_grad_norm), "lr": lr}
        return metrics | (self.heads.update_beside(sums, step) if self.heads else {})

    def measure(self, held_out: SequenceBatch | None) -> dict[str, float]:
        """Collective over all ranks. val/... of the held-out rows; {} without them."""
        if held_out is None:
            return {}
        if self.heads is None:
            return self.objective.measure(score(self.model, held_out, self.objective.asked, self.settings.supervised.micro_batch))
        logprobs, of_heads = self.heads.measure(held_out)
        return self.objective.measure(logprobs) | of_heads

    def save(self, directory: Path) -> str:
        """Collective over all ranks. Writes what was trained; a sentence that says where all is."""
        alone = self.settings.trains_heads_alone
        if not alone:
            self.model.save(str(directory / "model"))
        place = f"the model is in {(directory / 'model').resolve()}"
        if self.heads is None:
            return place
        self.heads.save(directory, self.model.source if alone else directory / "model")
        heads = f"the draft heads are in {(directory / 'medusa').resolve()}"
        return f"the model stays as it is in {self.settings.supervised.path}, {heads}" if alone else f"{place}, {heads}"

"""Train: the critic, then the actor and its draft heads, on the experience of one iteration."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from rlhf_mc.algorithms.losses import entropy_loss, kl_loss, language_model_loss, policy_loss, value_loss
from rlhf_mc.algorithms.minibatches import mini_batch_indices
from rlhf_mc.algorithms.schedule import lr_at
from rlhf_mc.batch import Experience, TrainingSlice
from rlhf_mc.config import Actor, Critic
from rlhf_mc.medusa.training import train_heads
from rlhf_mc.models.loss import Loss, LossSum
from rlhf_mc.models.passes import accumulate_gradients, bad_gradients, update, zero_gradients
from rlhf_mc.models.role import Role, RoleModel
from rlhf_mc.offload import TRAINING, Part, Visit
from rlhf_mc.reliability import fault_of_experience, fault_of_norm, fault_of_sums
from rlhf_mc.stages.checkpoint import finish_checkpoint
from rlhf_mc.stages.dump import keep_bad_batch
from rlhf_mc.stages.start import Run

POLICY_STATS = ("pg_loss", "ppo_kl", "ratio", "pg_clipfrac", "pg_clipfrac_lower", "ratio_clipped_low", "ratio_clipped_high", "entropy")
VALUE_STATS = ("vf_loss", "vf_clipfrac", "vpred_mean")


def mini_batches(run: Run, experience: Experience, iteration: int, epoch: int) -> Iterator[TrainingSlice]:
    """The mini-batches of one epoch."""
    settings = run.settings
    for indices in mini_batch_indices(settings.trainer.seed, iteration, epoch, len(experience), settings.num_minibatches):
        yield experience.select(indices)


def _steps(run: Run, experience: Experience, iteration: int) -> Iterator[tuple[int, TrainingSlice]]:
    """(number of the optimizer step in the whole run, its mini-batch) for all epochs of one iteration."""
    epochs = run.settings.algorithm.epochs
    step = iteration * epochs * run.settings.num_minibatches
    for epoch in range(epochs):
        for mini_batch in mini_batches(run, experience, iteration, epoch):
            if mini_batch.num_trained_tokens:
                yield step, mini_batch
            step += 1


def _learning_rate(run: Run, section: Actor | Critic, step: int) -> float:
    return lr_at(step, run.settings.trainer.iterations * run.settings.algorithm.epochs * run.settings.num_minibatches, section.optim)


def train(run: Run, experience: Experience, iteration: int) -> dict[str, float]:
    """Collective over all ranks. The critic, if any, then the actor, which rests while it warms up, then draft heads; metrics of all."""
    run.safe_point()  # the last one of the iteration: an update that was begun is finished
    finish_checkpoint(run)
    run.updated = True
    if skipped(run, "all models", fault_of_experience(experience, run.guard.bounds), experience, iteration):
        return run.guard.metrics()
    metrics, rests = {}, False
    if Role.CRITIC in run.roles:
        with run.clock.stage("update_critic"), run.residency.on_device(Role.CRITIC, TRAINING):
            metrics = train_critic(run, experience, iteration)
        rests = iteration < run.settings.critic.warmup_iterations
    if rests and not run.trains_heads:
        return metrics | run.guard.metrics()
    heads = Visit(Role.MEDUSA, TRAINING) if run.trains_heads else None
    with run.residency.on_device(Role.ACTOR, Part.PARAMS if rests else TRAINING, beside=heads):
        if not rests:
            with run.clock.stage("update_actor"):
                metrics |= train_actor(run, experience, iteration)
        if run.trains_heads:
            metrics |= train_draft_heads(run, iteration)
    run.weight_version += 1
    return metrics | run.guard.metrics()


def train_heads_alone(run: Run, iteration: int) -> dict[str, float]:
    """Collective over all ranks. The draft heads of an actor that stays as it is; medusa/... metrics."""
    with run.residency.on_device(Role.ACTOR, Part.PARAMS, beside=Visit(Role.MEDUSA, TRAINING)):
        metrics = train_draft_heads(run, iteration)
    run.weight_version += 1
    return metrics


def train_draft_heads(run: Run, iteration: int) -> dict[str, float]:
    """Collective over all ranks, the actor's params and what trains the heads on the device. On what was kept of the rollout, once."""
    with run.clock.stage("update_heads"):
        metrics = train_heads(run.drafter, run.actor, run.hidden, run.settings, iteration)
    run.hidden.clear()
    run.guard.judged("the draft heads", fault_of_norm(metrics["medusa/grad_norm"]))
    return metrics


def train_critic(run: Run, experience: Experience, iteration: int) -> dict[str, float]:
    """Collective over all ranks. Clipped regression of the values on the returns."""
    section = run.settings.critic
    meter = _Meter("critic")
    for step, mini_batch in _steps(run, experience, iteration):
        zero_gradients(run.critic)
        loss = critic_loss(mini_batch, section, run.critic)
        sums = accumulate_gradients(run.critic, mini_batch.sequences, "predicted", section.micro_batch, loss)
        lr, count = _learning_rate(run, section, step), mini_batch.num_trained_tokens
        grad_norm, fault = guarded_update(run, run.critic, lr, sums, count)
        if not skipped(run, "the critic", fault, experience, iteration):
            meter.add(sums, count, grad_norm=grad_norm, lr=lr)
    return meter.means()


def train_actor(run: Run, experience: Experience, iteration: int) -> dict[str, float]:
    """Collective over all ranks. Clipped policy gradient, with entropy bonus, KL loss and pretraining text where asked."""
    section = run.settings.actor
    meter = _Meter("actor")
    for step, mini_batch in _steps(run, experience, iteration):
        zero_gradients(run.actor)
        loss = actor_loss(run, mini_batch)
        sums = accumulate_gradients(run.actor, mini_batch.sequences, "predicted", section.micro_batch, loss, run.sampling)
        extra = accumulate_ptx(run, step) if run.sources.ptx else {}
        lr, count = _learning_rate(run, section, step), mini_batch.num_trained_tokens
        grad_norm, fault = guarded_update(run, run.actor, lr, sums | extra, count)
        if not skipped(run, "the actor", fault, experience, iteration):
            meter.add(sums, count, grad_norm=grad_norm, lr=lr, **extra)
    return meter.means()


def guarded_update(run: Run, model: RoleModel, lr: float, sums: dict[str, float], num_tokens: int) -> tuple[float, str | None]:
    """Collective over all ranks. An update with the gradients that are there: their norm; and what was wrong, for which there was none.

    sums: of the loss, over `num_tokens`.
    """
    bounds = run.guard.bounds
    fault = fault_of_sums(sums, num_tokens, bounds)
    if fault is not None:
        zero_gradients(model)
        return math.nan, fault
    grad_norm = update(model, lr, bounds.max_grad_norm)
    fault = fault_of_norm(grad_norm, bounds.max_grad_norm)
    if fault is not None:
        found = run.world.from_everyone(bad_gradients(model))
        where = [f"rank {rank}: {', '.join(names[:3])}{', ...' if names[3:] else ''}" for rank, names in enumerate(found) if names]
        fault = "; ".join([fault, *where])
    run.clock.progress()
    return grad_norm, fault


def skipped(run: Run, what: str, fault: str | None, experience: Experience, iteration: int) -> bool:
    """Alike on all ranks; no collective. Whether a fault made an update of `what` to be skipped; it is told, and the batch written down.

    Raises BadUpdateError after too many of them.
    """
    if fault is not None:
        place = keep_bad_batch(run, experience, iteration)
        run.tracker.say(f"guard: iteration {iteration}: an update of {what} is skipped: {fault}; the batch is in {place}")
        fault = f"iteration {iteration}, {fault}; batch: {place}"
    return run.guard.judged(what, fault)


def critic_loss(mini_batch: TrainingSlice, section: Critic, model: RoleModel) -> Loss:
    """The clipped value loss of `mini_batch`, over its one global count of tokens."""
    count, device = mini_batch.num_trained_tokens, model.world.device
    old, returns, mask = (x.to(device) for x in (mini_batch.values, mini_batch.returns, mini_batch.loss_mask))

    def of(values, packed) -> LossSum:
        at = packed.slots.to(device)
        sums = value_loss(values, old[at], returns[at], mask[at], section.value_clip)
        return LossSum(sums.loss / count, sums.stats)

    return Loss(VALUE_STATS, of)


def actor_loss(run: Run, mini_batch: TrainingSlice) -> Loss:
    """The policy loss of `mini_batch`, over its one global count of tokens, with entropy and KL added as configured."""
    section, kl = run.settings.actor, run.settings.algorithm.kl
    count, device = mini_batch.num_trained_tokens, run.world.device
    old, ref, advantages, mask = (
        x.to(device) for x in (mini_batch.old_logprobs, mini_batch.ref_logprobs, mini_batch.advantages, mini_batch.loss_mask)
    )

    def of(answers, packed) -> LossSum:
        at = packed.slots.to(device)
        new = answers.logprobs
        sums = policy_loss(new, old[at], advantages[at], mask[at], section.clip_ratio_low, section.clip_ratio_high, section.dual_clip)
        sums = sums.plus(entropy_loss(answers.entropy, mask[at]), weight=section.entropy_coef)
        if kl.use == "loss":
            sums = sums.plus(kl_loss(new, ref[at], mask[at], kl.estimator), weight=run.kl.coef)
        return LossSum(sums.loss / count, sums.stats)

    return Loss(POLICY_STATS + (("kl_loss",) if kl.use == "loss" else ()), of)


def accumulate_ptx(run: Run, step: int) -> dict[str, float]:
    """Collective over all ranks. Adds the gradient of the language-model loss on pretraining text (arXiv:2203.02155), times its coefficient."""
    batch = run.sources.ptx.batch(step)
    count, coef = int(batch.loss_mask.sum()), run.settings.actor.ptx_coef

    def of(answers, packed) -> LossSum:
        sums = language_model_loss(answers.logprobs, torch.ones_like(packed.targets, dtype=torch.bool))
        return LossSum(coef * sums.loss / count, sums.stats)

    sums = accumulate_gradients(run.actor, batch, "predicted", run.settings.actor.micro_batch, Loss(("lm_loss",), of))
    return {"ptx_loss": sums["lm_loss"] / count}


class _Meter:
    """Means over the optimizer steps of one iteration: of what is summed over tokens, by token; of the rest, by step."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.tokens = 0
        self.steps = 0
        self.by_token: dict[str, float] = {}
        self.by_step: dict[str, float] = {}
        self.last_lr = 0.0

    def add(self, sums: dict[str, float], num_tokens: int, lr: float, **values: float) -> None:
        """One optimizer step: sums over its `num_tokens` tokens, and values of the step as a whole."""
        self.tokens += num_tokens
        self.steps += 1
        self.last_lr = lr
        for name, value in sums.items():
            self.by_token[name] = self.by_token.get(name, 0.0) + value
        for name, value in values.items():
            self.by_step[name] = self.by_step.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """prefix/name -> mean; empty where every step was skipped for want of tokens that train."""
        if not self.steps:
            return {}
        means = {name: total / self.tokens for name, total in self.by_token.items()}
        means |= {name: total / self.steps for name, total in self.by_step.items()}
        return {f"{self.prefix}/{name}": value for name, value in (means | {"lr": self.last_lr}).items()}

"""What the tests of medusa/ run on ranks (see tests/ranks.py). Results are tensors, numbers and containers of these."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from models.on_ranks import exported, make_role, negative_log_likelihood
from torch import Tensor

from rlhf_mc.batch import SequenceBatch
from rlhf_mc.config import Medusa, MicroBatch, Optim, Parallel, Settings, Supervised, Trainer
from rlhf_mc.medusa import training
from rlhf_mc.medusa.drafter import DraftModel, build_drafter, update_heads
from rlhf_mc.medusa.files import check_heads, load_heads
from rlhf_mc.medusa.hidden_states import HiddenStates
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.medusa.steps import samples_of_steps
from rlhf_mc.medusa.training import joint_loss, measure_heads, train_heads
from rlhf_mc.models.passes import accumulate_gradients, score, update, zero_gradients
from rlhf_mc.models.role import RoleModel
from rlhf_mc.parallel.world import World
from rlhf_mc.stages.sft import responses
from rlhf_mc.stages.supervised import build_learner

BY_TOKENS = MicroBatch(tokens=25)


def settings_of(
    world: World, medusa: dict[str, Any], optim: dict[str, Any], dtype: str = "fp32", distributed_optimizer: bool = True
) -> Settings:
    """Of a run with draft heads on the grid of `world`."""
    grid = world.grid
    parallel = Parallel(
        tensor=grid.tensor,
        context=grid.context,
        pipeline=grid.pipeline,
        virtual_pipeline=grid.virtual,
        distributed_optimizer=distributed_optimizer,
    )
    return Settings(
        trainer=Trainer(device="cpu", dtype=dtype, iterations=10),
        parallel=parallel,
        medusa=Medusa(enabled=True, optim=Optim(**optim), **medusa),
    )


def weights_of(drafter: DraftModel) -> dict[str, Tensor]:
    """Collective over the model group. The whole tensors of the heads, copied to the host."""
    return {name: tensor.cpu().clone() for name, tensor in drafter.export()}


def kept(
    world: World, actor: RoleModel, batch: SequenceBatch, num_heads: int, steps: list[list[int]], step_tokens: int | None = None
) -> HiddenStates:
    """What a scoring forward of `batch` leaves for `steps`."""
    hidden = HiddenStates(world, num_heads, steps, step_tokens)
    score(actor, batch, "predicted", BY_TOKENS, hand_over=hidden.receiver(range(len(batch))))
    return hidden


def train(
    world: World,
    directory: str,
    batch: SequenceBatch,
    medusa: dict[str, Any],
    optim: dict[str, Any],
    num_iterations: int,
    tensors: dict[str, Tensor] | None = None,
    dtype: str = "fp32",
    distributed_optimizer: bool = True,
    chunk_elements: int = training._CHUNK_ELEMENTS,
) -> dict[str, Any]:
    """`num_iterations` of training on the same kept rows: metrics of each, and the heads before and after.

    Last, whether the actor's weights, and a gradient that it had accumulated before, are bit for bit what they were.
    """
    actor = make_role(world, directory, optim=Optim(), dtype=dtype)
    settings = settings_of(world, medusa, optim, dtype, distributed_optimizer)
    drafter = build_drafter(settings, actor, trained=True, tensors=tensors)
    before = weights_of(drafter)
    steps = samples_of_steps(len(batch), settings.medusa.steps, seed=1, iteration=0)
    hidden = kept(world, actor, batch, drafter.shape.num_heads, steps)
    zero_gradients(actor)
    accumulate_gradients(actor, batch, "predicted", BY_TOKENS, negative_log_likelihood(100))
    of_actor = [tensor.clone() for tensor in (*actor.weights(), *gradients(actor))]
    usual, training._CHUNK_ELEMENTS = training._CHUNK_ELEMENTS, chunk_elements
    try:
        metrics = [train_heads(drafter, actor, hidden, settings, iteration) for iteration in range(num_iterations)]
        measured = measure_heads(drafter, actor, hidden, settings.medusa.loss_decay)
    finally:
        training._CHUNK_ELEMENTS = usual
    untouched = all(torch.equal(a, b) for a, b in zip(of_actor, (*actor.weights(), *gradients(actor)), strict=True))
    return {
        "metrics": metrics,
        "measured": measured,
        "before": before,
        "after": weights_of(drafter),
        "actor untouched": untouched,
        "version": drafter.version,
        "accumulating": drafter.accumulating,
    }


def gradients(model: RoleModel | DraftModel) -> list[Tensor]:
    """The gradient buckets."""
    return [buffer.grad_data for buffer in model.buffers]


def bits_with_and_without(world: World, directory: str, batch: SequenceBatch) -> dict[str, bool]:
    """Whether scores and the actor's gradient are the same bits when rows are handed over and heads train on them."""
    settings = settings_of(world, {}, {})
    scores, grads = [], []
    for with_heads in (False, True):
        actor = make_role(world, directory, optim=Optim())
        hidden = HiddenStates(world, settings.medusa.num_heads, steps=[[0, 1], [2, 3, 4]])
        hand_over = hidden.receiver(range(len(batch))) if with_heads else None
        scores.append(score(actor, batch, "predicted", BY_TOKENS, hand_over=hand_over))
        if with_heads:
            train_heads(build_drafter(settings, actor, trained=True), actor, hidden, settings, iteration=0)
        zero_gradients(actor)
        accumulate_gradients(actor, batch, "predicted", BY_TOKENS, negative_log_likelihood(100))
        grads.append(torch.cat([gradient.flatten().clone() for gradient in gradients(actor)]))
    return {"scores": torch.equal(*scores), "gradient": torch.equal(*grads), "some": bool(grads[0].any())}


def train_jointly(
    world: World, directory: str, batch: SequenceBatch, medusa: dict[str, Any], optim: dict[str, Any], num_steps: int
) -> dict[str, Any]:
    """Steps of the actor on its own loss and the heads' loss beside it: sums, gradient norms, and the weights of both afterwards."""
    actor = make_role(world, directory, optim=Optim(**optim))
    settings = settings_of(world, medusa, optim)
    drafter = build_drafter(settings, actor, trained=True)
    loss = negative_log_likelihood(int(batch.loss_mask.sum()))
    sums, grad_norms = [], []
    for _ in range(num_steps):
        zero_gradients(actor)
        zero_gradients(drafter)
        beside = joint_loss(drafter, actor, batch, settings.medusa)
        sums.append(accumulate_gradients(actor, batch, "predicted", BY_TOKENS, loss, beside=beside))
        grad_norms.append((update(actor, optim["lr"]), update_heads(drafter, optim["lr"])))
    return {"sums": sums, "grad_norms": grad_norms, "actor": exported(actor), "heads": weights_of(drafter)}


def supervised(
    world: World, directory: str, batch: SequenceBatch, medusa: dict[str, Any] | None, optim: dict[str, Any], num_steps: int, output: str
) -> dict[str, Any]:
    """`num_steps` of SFT, with draft heads where `medusa` is given, saved to `output`: metrics, and the weights before and after.

    reloaded: the saved heads, as a run that names them in medusa.path starts from them, on rank 0.
    """
    settings = settings_of(world, medusa or {}, optim)
    section = Supervised(path=directory, optim=Optim(**optim), micro_batch=BY_TOKENS)
    settings = replace(settings, supervised=section, medusa=settings.medusa if medusa else Medusa())
    said: list[str] = []
    learner = build_learner(settings, responses(), world, num_steps, said.append)
    before = (exported(learner.model), learner.measure(batch))
    metrics = [learner.take_step(batch, step) for step in range(num_steps)]
    said.append(learner.save(Path(output)))
    found = {"metrics": metrics, "before": before, "after": (exported(learner.model), learner.measure(batch)), "said": said}
    if medusa and world.rank == 0:
        place = Path(output) / "medusa"
        check_heads(place, settings.medusa, learner.model.shape)
        found["reloaded"] = load_heads(place, HeadsShape.of(settings.medusa, learner.model.shape))
    return found


def take(
    world: World, directory: str, batch: SequenceBatch, steps: list[list[int]], step_tokens: int | None, max_rows: int
) -> dict[str, Any]:
    """What is kept for `steps`. sizes: of the chunks of all.  samples: by number, (rows, tokens, valid) of those on this rank."""
    hidden = kept(world, make_role(world, directory), batch, num_heads=2, steps=steps, step_tokens=step_tokens)
    samples = {}
    for number in range(len(batch)):
        for rows, labels in hidden.chunks([number], max_rows=1000):
            samples[number] = (rows, labels.tokens, labels.valid)
    sizes = [rows.size(0) for rows, _ in hidden.chunks(range(len(batch)), max_rows)]
    taken = [(step.samples, step.counts.tolist()) for step in hidden.taken()]
    num_bytes = hidden.num_bytes
    hidden.clear()
    after_clear = (hidden.num_bytes, [step.samples for step in hidden.taken()])
    return {"sizes": sizes, "samples": samples, "taken": taken, "num_bytes": num_bytes, "after clear": after_clear}


def error_of_tensors(world: World, directory: str, tensors: dict[str, Tensor]) -> str:
    """The message of what starting from `tensors` raises."""
    try:
        build_drafter(settings_of(world, {}, {}), make_role(world, directory), trained=False, tensors=tensors)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""

"""What the tests of models/ run on ranks (see tests/ranks.py). Results are tensors, numbers and containers of these."""

from __future__ import annotations

import gc
import resource
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from rlhf_mc.batch import SequenceBatch
from rlhf_mc.config import MicroBatch, Optim, Parallel, Recompute, Settings, Trainer
from rlhf_mc.models import hf_weights
from rlhf_mc.models.heads import PLAIN, Sampling, TokenLogprobs
from rlhf_mc.models.loss import Loss, LossSum
from rlhf_mc.models.passes import accumulate_gradients, bad_gradients, score, update, zero_gradients
from rlhf_mc.models.role import Head, Role, RoleModel, build_role
from rlhf_mc.models.stepped import stepped
from rlhf_mc.models.whole_directory import SaveError
from rlhf_mc.parallel.megatron_cpu import cpu_tensors_pass_for_cuda
from rlhf_mc.parallel.packing import PackedMicrobatch
from rlhf_mc.parallel.world import World


def make_role(
    world: World,
    directory: str,
    head: Head = "language",
    optim: Optim | None = None,
    dtype: str = "fp32",
    distributed_optimizer: bool = True,
    recompute: Recompute = "none",
) -> RoleModel:
    """The role of `directory` on the grid of `world`."""
    grid = world.grid
    parallel = Parallel(
        tensor=grid.tensor,
        context=grid.context,
        pipeline=grid.pipeline,
        virtual_pipeline=grid.virtual,
        distributed_optimizer=distributed_optimizer,
    )
    settings = Settings(trainer=Trainer(device="cpu", dtype=dtype, recompute=recompute), parallel=parallel)
    role = Role.ACTOR if head == "language" else Role.CRITIC
    return build_role(role, head, directory, settings, world, optim)


def logprobs(
    world: World, directory: str, batch: SequenceBatch, budget: MicroBatch, sampling: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    """Log-probs by scoring (of a frozen role), and log-probs and entropy as a loss sees them (of a trained role)."""
    drawn = PLAIN if sampling is None else Sampling(**sampling)
    scored = score(make_role(world, directory), batch, "predicted", budget, drawn)
    model = make_role(world, directory, optim=Optim())
    seen = torch.zeros(2, scored.numel())

    def look(answers: TokenLogprobs, microbatch: PackedMicrobatch) -> LossSum:
        if world.grid.speaks and not microbatch.fill:
            seen[:, microbatch.slots] = torch.stack((answers.logprobs, answers.entropy)).detach()
        return LossSum(answers.logprobs.sum(), {"entropy": answers.entropy.sum()})

    zero_gradients(model)
    accumulate_gradients(model, batch, "predicted", budget, Loss(("entropy",), look), drawn)
    world.sum_over_ranks(seen)
    return {"scored": scored, "trained": seen[0], "entropy": seen[1]}


def values(world: World, directory: str, batch: SequenceBatch, budget: MicroBatch) -> dict[str, Tensor]:
    """A value head at each sequence's end, and before each predicted token."""
    model = make_role(world, directory, "value")
    return {asked: score(model, batch, asked, budget) for asked in ("last", "predicted")}


def most_alive(world: World, directory: str, batch: SequenceBatch, budget: MicroBatch) -> int:
    """How many packed micro-batches there are at once on this rank, at most, when the head reads one; 0 where there is no head."""
    counts = [0]

    def count(rows: Tensor, microbatch: PackedMicrobatch) -> None:
        counts.append(sum(isinstance(found, PackedMicrobatch) for found in gc.get_objects()))

    score(make_role(world, directory), batch, "predicted", budget, hand_over=count)
    return max(counts)


def exported(model: RoleModel) -> dict[str, Tensor]:
    """Collective over the model group. The whole checkpoint, copied to the host."""
    return {name: tensor.cpu().clone() for name, tensor in model.export()}


def export_and_save(world: World, directory: str, target: str, head: Head = "language", dtype: str = "fp32") -> dict[str, Tensor]:
    """Saves the role at `target`; what export() gave on this rank."""
    model = make_role(world, directory, head, dtype=dtype)
    model.save(target)
    return exported(model)


def save_in_files_of(world: World, directory: str, target: str, file_bytes: int, bucket_bytes: int) -> None:
    """Saves with other limits on the size of a file and of an export bucket."""
    limits = hf_weights._FILE_BYTES, hf_weights._BUCKET_BYTES
    hf_weights._FILE_BYTES, hf_weights._BUCKET_BYTES = file_bytes, bucket_bytes
    try:
        make_role(world, directory).save(target)
    finally:
        hf_weights._FILE_BYTES, hf_weights._BUCKET_BYTES = limits


def load_error(world: World, directory: str, head: Head = "language") -> str:
    """Type and message of what loading `directory` raises."""
    try:
        make_role(world, directory, head)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def negative_log_likelihood(num_tokens: int) -> Loss:
    """Mean over `num_tokens` of the negative log-prob."""

    def of(answers: TokenLogprobs, microbatch: PackedMicrobatch) -> LossSum:
        nll = -answers.logprobs.sum()
        return LossSum(nll / num_tokens, {"nll": nll})

    return Loss(("nll",), of)


def train_step(model: RoleModel, batch: SequenceBatch, lr: float, budget: MicroBatch = MicroBatch()) -> float:
    """One step on the mean negative log-likelihood; the gradient norm."""
    zero_gradients(model)
    accumulate_gradients(model, batch, "predicted", budget, negative_log_likelihood(int(batch.loss_mask.sum())))
    return update(model, lr)


def step_with_zero_lr(
    world: World, directory: str, batch: SequenceBatch, dtype: str, distributed_optimizer: bool
) -> dict[str, Any]:
    """The weights before and after a step with learning rate 0."""
    model = make_role(world, directory, optim=Optim(), dtype=dtype, distributed_optimizer=distributed_optimizer)
    before = exported(model)
    grad_norm = train_step(model, batch, lr=0.0)
    return {"before": before, "after": exported(model), "grad_norm": grad_norm}


def small_steps(
    world: World, directory: str, batch: SequenceBatch, lr: float, num_steps: int, distributed_optimizer: bool
) -> list[tuple[Tensor, Tensor]]:
    """bf16 training with clipping off. After each step, param and main param of the final norm's weight."""
    model = make_role(world, directory, optim=Optim(clip_grad=1e9), dtype="bf16", distributed_optimizer=distributed_optimizer)
    param = model.last_chunk.decoder.final_layernorm.weight
    history = []
    for _ in range(num_steps):
        train_step(model, batch, lr)
        history.append((param.detach().clone(), param.main_param.detach().clone()))
    return history


def poisoned_sequence(world: World, directory: str, batch: SequenceBatch, token: int) -> tuple[Tensor, Tensor]:
    """Log-probs of a packed batch, before and after the embedding of `token` becomes NaN."""
    model = make_role(world, directory)
    budget = MicroBatch(tokens=int(batch.lengths.sum()))
    clean = score(model, batch, "predicted", budget)
    with torch.no_grad():
        model.chunks[0].embedding.word_embeddings.weight[token] = float("nan")
    return clean, score(model, batch, "predicted", budget)


def saved_on_full_disk(world: World, directory: str, target: str) -> str:
    """A save in several small files on a disk that refuses the first: what the error says. Then all ranks are in step."""
    model = make_role(world, directory)
    limits, (soft, hard) = (hf_weights._FILE_BYTES, hf_weights._BUCKET_BYTES), resource.getrlimit(resource.RLIMIT_FSIZE)
    hf_weights._FILE_BYTES, hf_weights._BUCKET_BYTES = 20_000, 9_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, hard))
    try:
        model.save(target)
    except SaveError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        hf_weights._FILE_BYTES, hf_weights._BUCKET_BYTES = limits
        assert world.from_everyone(world.rank) == list(range(world.size))
    return ""


def bits_of(model: RoleModel) -> dict[str, Tensor]:
    """Copies of params, main params and moments of this rank."""
    state = {f"param {name}": param for name, param in model.params().items()}
    state |= {f"{kind} {shard.name}": shard.tensor(kind) for shard in stepped(model) for kind in shard.kinds}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def steps_around_a_bad_one(
    world: World, directory: str, batch: SequenceBatch, dtype: str, distributed_optimizer: bool, spoilt: int, max_norm: float | None
) -> dict[str, Any]:
    """A step, a bad one, a step; beside a twin that takes megatron's own steps, and not the bad one.

    The bad one: NaN in the gradients of rank `spoilt`; or, with `max_norm`, a norm beyond it.
    """
    optim = Optim(lr=1e-2, clip_grad=0.1)
    model, twin = (make_role(world, directory, optim=optim, dtype=dtype, distributed_optimizer=distributed_optimizer) for _ in range(2))
    loss = negative_log_likelihood(int(batch.loss_mask.sum()))

    def accumulate(role: RoleModel) -> None:
        zero_gradients(role)
        accumulate_gradients(role, batch, "predicted", MicroBatch(), loss)

    for _ in range(2):
        accumulate(twin)
        finalize_model_grads(list(twin.ddp))
        for group in twin.optimizer.param_groups:
            group["lr"] = 1e-2
        with cpu_tensors_pass_for_cuda(True):
            twin.optimizer.step()
    accumulate(model)
    norms = [update(model, 1e-2)]
    before, version = bits_of(model), model.version
    accumulate(model)
    if max_norm is None and world.rank == spoilt:
        model.buffers[0].grad_data.view(-1)[0] = torch.nan
    norms.append(update(model, 1e-2, max_norm))
    found = bad_gradients(model)
    after = bits_of(model)
    unchanged = model.version == version and not model.accumulating and all(torch.equal(before[n], after[n]) for n in before)
    accumulate(model)
    norms.append(update(model, 1e-2))
    at_end, of_twin = bits_of(model), bits_of(twin)
    same = all(torch.equal(at_end[name], of_twin[name]) for name in at_end)
    moved = not all(torch.equal(at_end[name], after[name]) for name in at_end)
    return {"norms": norms, "unchanged": unchanged, "as_the_twin": same, "moved": moved, "bad": found}

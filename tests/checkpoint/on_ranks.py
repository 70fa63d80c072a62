"""What the tests of checkpoint/ run on ranks (see tests/ranks.py)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy
import torch
from torch import Tensor

from medusa.on_ranks import settings_of
from offload.draft_heads import draft_heads
from offload.on_ranks import HEADS, OPTIM, actor_and_critic, one_step, residency_of
from rlhf_mc.checkpoint import CheckpointError, FileRecord, find_origin, save, write_file
from rlhf_mc.checkpoint.generators import read_generators, write_generators
from rlhf_mc.checkpoint.layout import Layout
from rlhf_mc.checkpoint.roles import read_role, write_role
from rlhf_mc.medusa.drafter import build_drafter
from rlhf_mc.models.role import Resident
from rlhf_mc.models.stepped import stepped
from rlhf_mc.offload import TRAINING, Part, Residency
from rlhf_mc.offload.neighbours import neighbours
from rlhf_mc.parallel.world import World

OF_HEADS = dict(num_heads=2, shared_output=False)


def save_bytes(world: World, root: str, iteration: int, keep_last: int = 2, full_disk_of: int | None = None) -> str:
    """Every rank writes some bytes; the disk of one is full. What the error says, if there is one."""

    def write(directory: Path) -> list[FileRecord]:
        path = directory / f"rank{world.rank}"
        if world.rank == full_disk_of:
            os.symlink("/dev/full", path)
        return [write_file(path, [b"iteration ", str(iteration).encode(), bytes(100_000)])]

    try:
        save(world, Path(root), iteration, keep_last, {"iteration": iteration}, write)
    except CheckpointError as error:
        return str(error)
    return ""


def found(world: World, root: str, resume: str = "auto", iterations: int = 100) -> tuple[int, dict, tuple[str, ...]] | str:
    """(iteration, record, messages) of where a run would begin, or the error."""
    try:
        origin = find_origin(world, Path(root), resume, iterations)
    except ValueError as error:
        return str(error)
    return origin.iteration, origin.snapshot.record if origin.snapshot else {}, origin.messages


def layout_of(world: World, distributed: bool) -> Layout:
    return Layout(world.size, world.grid.tensor, world.grid.pipeline, distributed)


def state_of(models: list[Resident], residency: Residency) -> dict[str, Tensor]:
    """Every tensor of every role but its gradients."""
    state = {}
    for model in models:
        with residency.on_device(model.role, TRAINING):
            for part, what, tensor in residency.state(model.role).tensors():
                if part is not Part.GRADS:
                    state[f"{model.role.value} {part.label} {what}"] = tensor.detach().clone()
    return state


def train(models: list[Resident], residency: Residency, steps: int) -> None:
    """Each role in turn."""
    for _ in range(steps):
        for model in models:
            with residency.on_device(model.role, TRAINING):
                one_step(model)


def saved_and_read(
    world: World, language: str, value: str, directory: str, dtype: str, distributed: bool, offload: bool = True, share: bool = False
) -> list[str]:
    """Trains two roles and draft heads, saves them, and trains on; other models read that and train on. Names of what differs.

    Saved once more unchanged, the files have the same bytes; after a step, others.
    """

    def make() -> tuple[list[Resident], Residency]:
        models = actor_and_critic(world, language, value, dtype, distributed)
        models.append(draft_heads(models[0], HEADS, OPTIM, distributed))
        return models, residency_of(world, models, enabled=offload, shared_by=neighbours(world) if share else None)

    def write(name: str) -> list[FileRecord]:
        path = Path(directory, name)
        path.mkdir(exist_ok=True)
        return [record for model in models for record in write_role(residency, model.role, path)]

    models, residency = make()
    train(models, residency, 2)
    first, again = write("saved"), write("again")
    at_save = state_of(models, residency)
    train(models, residency, 1)
    later = write("later")
    assert first == again and all(a.sha256 != b.sha256 for a, b in zip(first, later, strict=True))
    expected = {f"later {name}": tensor for name, tensor in state_of(models, residency).items()} | at_save

    torch.manual_seed(world.rank + 17)
    models, residency = make()
    if world.size > 1:
        torch.distributed.barrier()
    for model in models:
        read_role(residency, model.role, Path(directory, "saved"), layout_of(world, distributed))
    residency.all_off()
    read = state_of(models, residency)
    train(models, residency, 1)
    read |= {f"later {name}": tensor for name, tensor in state_of(models, residency).items()}
    assert read.keys() == expected.keys() and len(read) > 20
    return [name for name in read if not torch.equal(read[name], expected[name])]


def draws_after_reading(world: World, directory: str) -> bool:
    """Whether all generators go on as they would have."""

    def draw() -> list[float]:
        return [random.gauss(0, 1), float(numpy.random.normal()), float(torch.randn(()))]

    for _ in range(world.rank + 1):
        draw()
    write_generators(world, Path(directory))
    expected = draw()
    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
    read_generators(world, Path(directory), world.rank)
    return draw() == expected


def handed_on(
    world: World, language: str, value: str, dtype: str, distributed: bool, target: str, source: str | None = None, saved: Layout | None = None
) -> tuple[dict[str, Tensor], list[FileRecord]]:
    """Trained roles and draft heads, or those that another layout left at `source`, written to `target`: whole tensors, and the files."""
    models = actor_and_critic(world, language, value, dtype, distributed)
    models.append(build_drafter(settings_of(world, OF_HEADS, {}, dtype, distributed), models[0], trained=True))
    residency = residency_of(world, models)
    if source is None:
        train(models[:2], residency, 2)
        with residency.on_device(models[2].role, TRAINING):
            fill_with_numbers(models[2], residency)
    else:
        for model in models:
            read_role(residency, model.role, Path(source), saved)
    os.makedirs(target, exist_ok=True)
    files = [record for model in models for record in write_role(residency, model.role, Path(target))]
    whole: dict[str, Tensor] = {}
    for model in models:
        with residency.on_device(model.role, Part.PARAMS):
            whole |= {f"{model.role.value} {name}": tensor.cpu().clone() for name, tensor in model.export()}
    return whole, files


@torch.no_grad()
def fill_with_numbers(model: Resident, residency: Residency) -> None:
    """Another number for each element that is stepped, as training would leave it; padded rows stay zero."""
    for shard in stepped(model):
        for kind in shard.kinds:
            tensor = shard.tensor(kind)
            numbers = torch.arange(shard.start, shard.start + tensor.numel()) % 251 + len(kind) + model.world.grid.tensor_rank
            rows = torch.arange(shard.start, shard.start + tensor.numel()) // shard.shape[-1]
            tensor.copy_((numbers * (rows < 32) if tensor.dim() else torch.tensor(7)).view(tensor.shape))
    residency.state(model.role).rebuild_params()
    model.version += 1

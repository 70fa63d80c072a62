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
from rlhf_mc.checkpoint import CheckpointError, FileRecord, Saving, find_origin, settings_record, write_file
from rlhf_mc.checkpoint.export import export
from rlhf_mc.checkpoint.generators import generator_states, read_generators, write_generators
from rlhf_mc.checkpoint.layout import Layout
from rlhf_mc.checkpoint.roles import part_of, read_role
from rlhf_mc.checkpoint.snapshot import publish
from rlhf_mc.medusa.drafter import build_drafter
from rlhf_mc.models.role import Resident, Role
from rlhf_mc.models.stepped import stepped
from rlhf_mc.offload import TRAINING, Part, Residency
from rlhf_mc.offload.neighbours import neighbours
from rlhf_mc.parallel.world import World
from rlhf_mc.rollout_files import BackgroundWriter

OF_HEADS = dict(num_heads=2, shared_output=False)
VOCAB = 15
OF_VOCABULARY = ("word_embeddings.weight", "output_layer.weight", "lm_heads.0.weight", "lm_heads.1.weight")


def save_bytes(
    world: World, root: str, iteration: int, keep_last: int = 2, full_disk_of: int | None = None, value: float | None = None, **best
) -> str:
    """Every rank writes some bytes; the disk of one is full. What the error says, if there is one."""

    def write(directory: Path) -> list[FileRecord]:
        path = directory / f"rank{world.rank}"
        if world.rank == full_disk_of:
            os.symlink("/dev/full", path)
        return [write_file(path, [b"iteration ", str(iteration).encode(), bytes(100_000)])]

    try:
        with BackgroundWriter() as writer:
            record = {"iteration": iteration} | ({} if value is None else {"metrics": {"val/x": value}})
            Saving(world, Path(root), iteration, record, write, writer).publish(keep_last, **best)
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
    return Layout(world.size, world.grid.tensor, world.grid.pipeline, distributed, world.grid.virtual)


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
        return [record for model in models for record in part_of(residency, model.role).write(path)]

    models, residency = make()
    train(models, residency, 2)
    parts = [part_of(residency, model.role) for model in models]
    again = write("again")
    for model in models:  # scoring goes on while a thread writes
        with residency.on_device(model.role, Part.PARAMS):
            pass
    os.makedirs(Path(directory, "saved"), exist_ok=True)
    first = [record for part in parts for record in part.write(Path(directory, "saved"))]
    at_save = state_of(models, residency)
    train(models, residency, 1)
    later = write("later")
    assert first == again and all(a.digest != b.digest for a, b in zip(first, later, strict=True))
    expected = {f"later {name}": tensor for name, tensor in state_of(models, residency).items()} | at_save

    torch.manual_seed(world.rank + 17)
    models, residency = make()
    if world.size > 1:
        torch.distributed.barrier()
    for model in models:
        read_role(residency, model.role, Path(directory, "saved"), layout_of(world, distributed))
    residency.all_off()
    assert residency.ledger.moved() == residency.ledger.minimum()
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
    write_generators(generator_states(world), world.rank, Path(directory))
    expected = draw()
    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
    read_generators(world, Path(directory), world.rank)
    return draw() == expected


def handed_on(
    world: World,
    language: str,
    value: str,
    dtype: str,
    distributed: bool,
    target: str,
    source: str | None = None,
    saved: Layout | None = None,
) -> tuple[dict[str, Tensor], list[FileRecord]]:
    """Two roles and draft heads full of numbers, or what another layout left at `source`, written to `target`: whole tensors, and files."""
    models = actor_and_critic(world, language, value, dtype, distributed)
    models.append(build_drafter(settings_of(world, OF_HEADS, {}, dtype, distributed), models[0], trained=True))
    residency = residency_of(world, models)
    for model in models:
        if source is None:
            with residency.on_device(model.role, TRAINING):
                fill_with_numbers(model, residency)
        else:
            read_role(residency, model.role, Path(source), saved)
    os.makedirs(target, exist_ok=True)
    files = [record for model in models for record in part_of(residency, model.role).write(Path(target))]
    whole: dict[str, Tensor] = {}
    for model in models:
        with residency.on_device(model.role, Part.PARAMS):
            whole |= {f"{model.role.value} {name}": tensor.cpu().clone() for name, tensor in model.export()}
    return whole, files


@torch.no_grad()
def fill_with_numbers(model: Resident, residency: Residency) -> None:
    """Another number for each element that is stepped, alike where ranks hold the same; rows that pad the vocabulary stay zero."""
    for shard in stepped(model):
        elements = torch.arange(shard.start, shard.start + shard.main.numel())
        split = len(shard.shape) == 2 and shard.shape[0] > 1
        rows = elements // shard.shape[-1] + model.world.grid.tensor_rank * shard.shape[0]
        is_real = rows < VOCAB if split and shard.name.endswith(OF_VOCABULARY) else torch.ones_like(elements)
        for kind in shard.kinds:
            numbers = (elements % 251 + len(kind) + (7 * model.world.grid.tensor_rank if split else 0)) * is_real
            target = shard.tensor(kind)
            target.copy_(numbers.view(target.shape) if target.dim() else torch.tensor(7))
    residency.state(model.role).rebuild_params()
    model.version += 1


def published(world: World, language: str, value: str, dtype: str, distributed: bool, root: str) -> None:
    """Actor, critic and draft heads full of numbers: a checkpoint root/000001, and beside it what each role saves by itself."""
    os.makedirs(f"{root}/000001.partial", exist_ok=True)
    settings = settings_of(world, OF_HEADS | {"shared_output": True}, {}, dtype, distributed)
    actor, critic = actor_and_critic(world, language, value, dtype, distributed)
    heads = build_drafter(settings, actor, trained=True)
    models = [actor, critic, heads]
    residency = residency_of(world, models)
    for model in models:
        with residency.on_device(model.role, TRAINING):
            fill_with_numbers(model, residency)
    files = [record for model in models for record in part_of(residency, model.role).write(Path(root, "000001.partial"))]
    for model in (actor, critic):
        with residency.on_device(model.role, Part.PARAMS):
            model.save(f"{root}/{model.role.value}")
    with residency.on_device(heads.role, Part.PARAMS):
        heads.save(f"{root}/medusa", actor.shape, f"{root}/actor")
    paths = {"actor": {"path": language}, "critic": {"path": None}, "reward_model": {"path": value}}
    record = {"settings": settings_record(settings) | paths, "layout": layout_of(world, distributed).record()}
    shares = world.from_everyone(files)
    if world.rank == 0:
        publish(Path(root, "000001.partial"), record, [file for share in shares for file in share])
    world.any_rank(False)


def export_all(world: World, checkpoint: str, target: str) -> None:
    """Each trained role of a checkpoint to `target`/ROLE."""
    for role in (Role.ACTOR, Role.CRITIC, Role.MEDUSA):
        export(Path(checkpoint), Path(target, role.value), role)


def export_roles(world: World, root: str) -> dict[str, str]:
    """Each role of root/000001 to root/exported; of a damaged and of a missing role, the error."""
    checkpoint, target = Path(root, "000001"), Path(root, "exported")
    export_all(world, str(checkpoint), str(target))
    errors = {}
    harmed = next(checkpoint.glob("*critic*"))
    harmed.write_bytes(harmed.read_bytes()[:-4])
    for role in (Role.CRITIC, Role.REWARD):
        try:
            export(checkpoint, target / "not", role)
        except ValueError as error:
            errors[role.value] = str(error)
    return errors

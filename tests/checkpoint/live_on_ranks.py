"""What the tests of saving beside moving states and updates run on ranks (see tests/ranks.py): files against the state of their moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from offload.draft_heads import draft_heads
from offload.on_ranks import HEADS, OPTIM, actor_and_critic, one_step, residency_of
from offload.poison import poisoned
from rlhf_mc.checkpoint.roles import RolePart, part_of
from rlhf_mc.models.role import Resident, Role
from rlhf_mc.models.stepped import stepped
from rlhf_mc.offload import TRAINING, Part, Residency, Visit
from rlhf_mc.offload.neighbours import neighbours
from rlhf_mc.parallel.world import World

State = dict[str, Tensor]
ROLES = (Role.ACTOR, Role.CRITIC, Role.MEDUSA)
_ROOM = 1 << 30
_COPY_SECONDS = 1e-3


@dataclass(frozen=True)
class Models:
    """Three trained roles on a device that has room for all, so that whatever is expected next comes at once; everything on the host.

    live: what each role's optimizer stepped last, copied on the device at that moment.
    """

    residency: Residency
    directory: Path
    live: dict[Role, State]

    @staticmethod
    def of(world: World, language: str, value: str, directory: str, dtype: str, distributed: bool, share: bool = False) -> Models:
        models: list[Resident] = [*actor_and_critic(world, language, value, dtype, distributed)]
        models.append(draft_heads(models[0], HEADS, OPTIM, distributed))
        shared_by = neighbours(world) if share else None
        residency = residency_of(world, models, device_budget_bytes=_ROOM, shared_by=shared_by)
        return Models(residency, Path(directory), {})

    def step(self, role: Role) -> None:
        """Collective over all ranks. An update of the role, which stays on the device."""
        with self.residency.on_device(role, TRAINING) as model:
            one_step(model)
            self.live[role] = {f"{s.name}:{kind}": s.tensor(kind).detach().clone() for s in stepped(model) for kind in s.kinds}

    def expect(self, role: Role) -> None:
        """Begins to bring all of a role to the device; the copies are in flight when this returns."""
        self.residency.expect(Visit(role, TRAINING))
        copies = [copied for holding in self.residency._holdings.values() if holding.role is role for copied in holding.in_flight]
        assert any(not copied._future.done() for copied in copies), "nothing is in flight"

    def written(self, part: RolePart, name: str) -> State | None:
        """What a file of the role has once it is written; None where another rank writes it."""
        place = self.directory / name
        place.mkdir(parents=True, exist_ok=True)
        return load_file(place / part.file) if part.write(place) else None

    def save(self, role: Role, name: str) -> State | None:
        """Collective over all ranks. Begins a save now, and ends it."""
        return self.written(part_of(self.residency, role), name)

    def differences(self, role: Role, found: State | None) -> list[str]:
        """Tensors of a file that are not the role's live state, bit for bit."""
        if found is None:
            return []
        live = self.live[role]
        assert found.keys() == live.keys() and len(live) >= 4
        return [f"{role.value} {name}" for name in live if not torch.equal(found[name], live[name])]


def saved_in_flight(world: World, **options) -> tuple[list[str], int]:
    """Saves that begin, or are written, while copies of the states are in flight: what differs, and how many files were written."""
    with poisoned(copy_seconds=_COPY_SECONDS):
        models = Models.of(world, **options)
        for role in ROLES:
            models.step(role)
        faults, num_files = [], 0
        for begin in (_leaving, _another_coming, _itself_coming, _moving_while_written):
            for role, found in begin(models):
                faults += [f"{begin.__name__}: {fault}" for fault in models.differences(role, found)]
                num_files += found is not None
        models.residency.all_off()  # copies that are in flight need the memory of the models
    return faults, num_files


Case = tuple[Role, State | None]


def _leaving(models: Models) -> Iterator[Case]:
    """The role is on the device, and its host copy is of before the update: it leaves as the save begins."""
    for role in ROLES:
        models.step(role)
        yield role, models.save(role, "leaving")


def _another_coming(models: Models) -> Iterator[Case]:
    """The role leaves while all of another comes; then that other one is saved, and all of the first comes."""
    models.step(Role.ACTOR)
    models.expect(Role.CRITIC)
    yield Role.ACTOR, models.save(Role.ACTOR, "another-coming")
    models.expect(Role.ACTOR)
    yield Role.CRITIC, models.save(Role.CRITIC, "another-coming")


def _itself_coming(models: Models) -> Iterator[Case]:
    """The role that is saved is itself on its way to the device."""
    for role in ROLES:
        models.expect(role)
        yield role, models.save(role, "itself-coming")


def _moving_while_written(models: Models) -> Iterator[Case]:
    """A thread writes again and again what was begun once, while the roles come and go without an update."""
    parts = {role: part_of(models.residency, role) for role in ROLES}
    found: list[Case] = []

    def write(number: int) -> None:
        for role, part in parts.items():
            found.append((role, models.written(part, f"moving-{number}")))

    def move() -> None:
        for role in ROLES * 2:
            for asked in (Part.PARAMS, TRAINING):
                with models.residency.on_device(role, asked, Visit(ROLES[ROLES.index(role) - 1], TRAINING)):
                    pass

    _beside(write, move)
    assert len(found) > len(parts), "nothing was written while states moved"
    yield from found


def _beside(write: Callable[[int], None], move: Callable[[], None]) -> None:
    """Writes in a thread, as often as it takes until `move` is done."""
    moved = threading.Event()

    def work() -> None:
        number = 0
        while not moved.is_set():
            write(number)
            number += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        move()
    finally:
        moved.set()
        thread.join()


def saved_twice(world: World, **options) -> tuple[list[str], list[str]]:
    """A save, an update of each role, a save: what differs from the state of its moment; and which tensors are alike in both."""
    with poisoned(copy_seconds=_COPY_SECONDS):
        models = Models.of(world, **options)
        saves: list[dict[Role, State | None]] = []
        faults: list[str] = []
        for name in ("first", "second"):
            for role in ROLES:
                models.step(role)
            saves.append({role: models.save(role, name) for role in ROLES})
            faults += [f"{name}: {fault}" for role in ROLES for fault in models.differences(role, saves[-1][role])]
    first, second = saves
    alike = [f"{r.value} {name}" for r in ROLES for name, tensor in (first[r] or {}).items() if torch.equal(tensor, second[r][name])]
    return faults, alike

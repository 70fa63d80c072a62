"""What the tests of offload/ run on ranks (see tests/ranks.py)."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from models.on_ranks import exported, make_role, train_step
from offload.draft_heads import DraftHeads, draft_heads
from offload.poison import poisoned
from rlhf_mc.batch import SequenceBatch, offsets_of
from rlhf_mc.config import ConfigError, Medusa, MicroBatch, Offload, Optim, Parallel, Settings, Trainer
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.loss import Loss, LossSum
from rlhf_mc.models.passes import accumulate_gradients, score, update, zero_gradients
from rlhf_mc.models.optimizer import torch_optimizers
from rlhf_mc.models.role import Resident, Role, RoleModel, build_role
from rlhf_mc.offload import EMPTY, TRAINING, Ledger, ModelState, Part, Residency, ResidencyError, Visit
from rlhf_mc.offload.arena import storage_key
from rlhf_mc.offload.host_plan import plan_residency, refuse_small_host
from rlhf_mc.offload.minimum import RoleBytes, ppo_visits
from rlhf_mc.offload.neighbours import neighbours
from rlhf_mc.offload.planned import host_needs, planned_bytes, planned_visits
from rlhf_mc.offload.residue import residue
from rlhf_mc.offload.sizes import HeadsKind, Place, RoleKind, heads_bytes, role_bytes
from rlhf_mc.parallel.world import World, seed_everything
from rlhf_mc.tracking import Trace

OPTIM = Optim(lr=1e-3, weight_decay=0.1)
HEADS = Medusa(enabled=True, num_heads=2)
#: So small that every part has several storages.
CHUNK_BYTES = 32 << 10


def random_batch(vocab: int = 101) -> SequenceBatch:
    """Six sequences."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([9, 13, 5, 20, 11, 7])
    tokens = torch.randint(0, vocab, (int(lengths.sum()),), generator=generator)
    mask = torch.ones(tokens.numel(), dtype=torch.bool)
    mask[offsets_of(lengths)[:-1]] = False
    return SequenceBatch(tokens, lengths, mask)


BATCH = random_batch()


def actor_and_critic(world: World, language: str, value: str, dtype: str, distributed: bool) -> list[RoleModel]:
    """Two trained roles."""
    return [
        make_role(world, language, "language", OPTIM, dtype, distributed),
        make_role(world, value, "value", OPTIM, dtype, distributed),
    ]


def residency_of(world: World, models: list[Resident], **settings) -> Residency:
    """A residency over `models`, everything off the device."""
    return Residency(world, [ModelState.of(model, CHUNK_BYTES) for model in models], Ledger(), **settings)


def trained(
    world: World, language: str, value: str, dtype: str, distributed: bool, steps: int, offload: bool, share: bool = False
) -> dict[str, Tensor]:
    """Actor (with draft heads beside it) and critic take turns for `steps` steps; with `offload`, all leaves between any two stages."""
    models = actor_and_critic(world, language, value, dtype, distributed)
    heads = draft_heads(models[0], HEADS, OPTIM, distributed)
    shared_by = neighbours(world) if share else None
    residency = residency_of(world, [*models, heads], enabled=offload, shared_by=shared_by)
    beside = {Role.ACTOR: Visit(Role.MEDUSA, TRAINING)}
    results: dict[str, Tensor] = {}
    for step in range(steps):
        for model in models:
            with residency.on_device(model.role, Part.PARAMS):
                results[f"{model.role.value} score {step}"] = score(model, BATCH, "predicted", MicroBatch())
            with residency.on_device(model.role, TRAINING, beside=beside.get(model.role)):
                results[f"{model.role.value} norm {step}"] = torch.tensor(one_step(model))
                if model.role in beside:
                    results[f"medusa norm {step}"] = torch.tensor(one_step(heads))
            if step % 3 == 0:
                residency.all_off()
    moved = residency.ledger.moved()
    assert moved == residency.ledger.minimum()
    assert any(route.role is Role.MEDUSA for route in moved) == (offload and world.grid.is_last_stage)
    for model in (*models, heads):
        with residency.on_device(model.role, TRAINING):
            if isinstance(model, RoleModel):
                results |= {f"{model.role.value} {name}": tensor for name, tensor in exported(model).items()}
            for part, what, tensor in residency.state(model.role).tensors():
                if part is not Part.GRADS:
                    results[f"{model.role.value} {part.label} {what}"] = tensor.detach().clone()
    return results


def regress(model: RoleModel, batch: SequenceBatch) -> float:
    """One step of a value model towards 1 at every predicted token; the gradient norm."""
    count = int(batch.loss_mask.sum())
    loss = Loss(("sum",), lambda values, microbatch: LossSum((values - 1).square().sum() / count, {"sum": values.sum()}))
    zero_gradients(model)
    accumulate_gradients(model, batch, "predicted", MicroBatch(), loss)
    return update(model, 1e-3)


def one_step(model: RoleModel | DraftHeads) -> float:
    """One training step of any role; the gradient norm."""
    if isinstance(model, DraftHeads):
        return model.step()
    return train_step(model, BATCH, 1e-3) if model.head == "language" else regress(model, BATCH)


def compare_training(world: World, steps: int, share: bool, **arguments) -> list[str]:
    """Names of results that differ in any bit between training with offload and without."""
    seed_everything(1)
    plain = trained(world, steps=steps, offload=False, **arguments)
    seed_everything(1)
    with poisoned(copy_seconds=1e-4):
        offloaded = trained(world, steps=steps, offload=True, share=share, **arguments)
    assert len(plain) > 50 and plain.keys() == offloaded.keys()
    return [name for name in plain if not torch.equal(plain[name], offloaded[name])]


def measured_and_predicted_bytes(
    world: World, language: str, value: str, dtype: str, distributed: bool
) -> list[tuple[str, RoleBytes, RoleBytes]]:
    """(role, bytes found, bytes predicted from config.json and the layout), for four roles and all kinds of draft heads on this rank."""
    actor, critic = actor_and_critic(world, language, value, dtype, distributed)
    frozen = [make_role(world, language, "language", dtype=dtype), make_role(world, value, "value", dtype=dtype)]
    place = Place.of(world.grid)
    results = []
    for model in (actor, critic, *frozen):
        trained = model.optimizer is not None
        kind = RoleKind(model.shape, model.head == "value", trained, model.dtype.itemsize, model.table.cos.shape[0], distributed)
        found, predicted = ModelState.of(model).role_bytes(), role_bytes(kind, place)
        results.append((f"{model.role.value}, {'trained' if trained else 'frozen'}", found, predicted))
    for shared_output, optim in itertools.product((True, False), (OPTIM, None)):
        settings = Medusa(num_heads=3, num_layers=2, shared_output=shared_output)
        heads = HeadsShape.of(settings, actor.shape)
        kind = HeadsKind(heads, actor.shape, optim is not None, actor.dtype.itemsize, distributed)
        found, predicted = ModelState.of(draft_heads(actor, settings, optim, distributed)).role_bytes(), heads_bytes(kind, place)
        assert any(predicted.parts.values()) == world.grid.is_last_stage
        results.append((f"{heads}, {'trained' if optim else 'frozen'}", found, predicted))
    return results


def left_after_all_off(world: World, language: str, value: str, dtype: str, distributed: bool) -> dict[str, int]:
    """Bytes that two trained roles still hold beside host copies: in their parts, and in any other new tensor."""
    before = set(_storages())
    models = actor_and_critic(world, language, value, dtype, distributed)
    residency = residency_of(world, models)
    for model in models:
        with residency.on_device(model.role, TRAINING):
            one_step(model)
    residency.all_off()
    arenas = {arena.key for model in models for of_part in residency.state(model.role).arenas.values() for arena in of_part}
    hosts = {holding.host.bytes.untyped_storage()._cdata for holding in residency._holdings.values() if holding.host}
    left = {"in parts": 0, "elsewhere": 0}
    for key, num_bytes in _storages().items():
        if key not in before and key not in hosts:
            left["in parts" if key in arenas else "elsewhere"] += num_bytes
    return left


def _storages() -> dict[int, int]:
    """Bytes of every tensor's storage in this process, by identity."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, Tensor)]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


def parts_of_tensors(world: World, language: str, value: str, dtype: str, distributed: bool) -> list[str]:
    """What is wrong after a step: a storage in two parts, or a tensor, reached in any of megatron's ways, in none."""
    wrong = []
    for model in actor_and_critic(world, language, value, dtype, distributed):
        state = ModelState.of(model, CHUNK_BYTES)
        one_step(model)
        keys = [arena.key for arenas in state.arenas.values() for arena in arenas]
        if len(keys) != len(set(keys)):
            wrong.append("a storage is in two parts")
        params = list(model.params().values())
        buckets = [bucket for ddp in model.ddp for group in ddp.bucket_groups for bucket in group.buckets]
        buffers = [*model.buffers, *buckets]
        reachable = [*model.weights()]
        reachable += [p.main_grad for p in params] + [b.grad_data for b in buffers]
        reachable += [getattr(p, "main_param", None) for p in params] + [b.param_data for b in buffers]
        for optimizer in torch_optimizers(model.optimizer):
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            reachable += stepped + [p.grad for p in stepped]
            reachable += [t for moments in optimizer.state.values() for t in moments.values()]
        wrong += [f"{tuple(t.shape)} lies in no part" for t in reachable if t is not None and storage_key(t) not in keys]
    return wrong


def addresses_over_cycles(world: World, language: str, value: str, cycles: int) -> dict[str, int]:
    """How many different host addresses each part had, and by how much resident memory grew (bytes) after the first cycles."""
    models = actor_and_critic(world, language, value, "bf16", True)
    residency = residency_of(world, models)
    seen: dict[str, set[int]] = {}
    rss = []
    for _ in range(cycles):
        for model in models:
            with residency.on_device(model.role, TRAINING):
                pass
        residency.all_off()
        residency.ledger.metrics()
        for holding in residency._holdings.values():
            if holding.host:
                seen.setdefault(holding.name, set()).add(holding.host.address)
        rss.append(int(open("/proc/self/statm").read().split()[1]) * 4096)
    return {name: len(addresses) for name, addresses in seen.items()} | {"grown": max(rss[10:]) - max(rss[:10])}


def refusals(world: World, language: str, value: str) -> dict[str, str]:
    """What each impossible request says."""
    models = actor_and_critic(world, language, value, "bf16", True)
    frozen = make_role(world, language, dtype="bf16")
    frozen.role = Role.REFERENCE
    heads = draft_heads(models[0], Medusa(num_heads=48, shared_output=False))
    residency = residency_of(world, [*models, frozen, heads], device_budget_bytes=500 << 10)
    actor = models[0]
    messages = {}

    def ask(name: str, function) -> None:
        try:
            function()
            messages[name] = "served"
        except (ResidencyError, RuntimeError) as error:
            messages[name] = f"{type(error).__name__}: {error}"

    def visit(role: Role, parts: Part, inside=lambda: None, beside: Visit | None = None) -> None:
        with residency.on_device(role, parts, beside=beside):
            inside()

    def accumulate() -> None:
        loss = Loss(("sum",), lambda answers, microbatch: LossSum(answers.logprobs.sum(), {"sum": answers.logprobs.sum()}))
        accumulate_gradients(actor, BATCH, "predicted", MicroBatch(), loss)

    ask("frozen", lambda: visit(Role.REFERENCE, TRAINING))
    ask("no such role", lambda: visit(Role.REWARD, Part.PARAMS))
    ask("no params", lambda: visit(Role.ACTOR, Part.GRADS))
    ask("no main params", lambda: visit(Role.ACTOR, Part.PARAMS | Part.GRADS | Part.OPTIMIZER))
    ask("budget", lambda: visit(Role.ACTOR, TRAINING))
    ask("frozen beside", lambda: visit(Role.ACTOR, Part.PARAMS, beside=Visit(Role.MEDUSA, TRAINING)))
    ask("twice", lambda: visit(Role.ACTOR, Part.PARAMS, beside=Visit(Role.ACTOR, Part.PARAMS)))
    ask("budget of both", lambda: visit(Role.ACTOR, Part.PARAMS, beside=Visit(Role.MEDUSA, Part.PARAMS)))
    ask("score while off", lambda: score(actor, BATCH, "predicted", MicroBatch()))
    ask("save while off", lambda: actor.save("/nonexistent"))
    ask("update without main params", lambda: visit(Role.ACTOR, Part.PARAMS | Part.GRADS, lambda: update(actor, 1e-3)))
    ask("accumulate without gradients", lambda: visit(Role.ACTOR, Part.PARAMS, accumulate))
    ask("nested", lambda: visit(Role.ACTOR, Part.PARAMS, lambda: visit(Role.CRITIC, Part.PARAMS)))
    ask("off inside", lambda: visit(Role.ACTOR, Part.PARAMS, residency.all_off))
    ask("accumulating", lambda: (visit(Role.ACTOR, Part.PARAMS | Part.GRADS, accumulate), residency.all_off()))
    ask("zeroed", lambda: (visit(Role.ACTOR, Part.PARAMS | Part.GRADS, lambda: zero_gradients(actor)), residency.all_off()))
    ask("freed by others", lambda: visit(Role.ACTOR, Part.PARAMS, residency.state(Role.ACTOR).arenas[Part.PARAMS][0].release))
    return messages


def replaced_memory(world: World, language: str) -> str:
    """What is said when something gives a parameter new memory behind Residency's back."""
    model = make_role(world, language, optim=OPTIM)
    residency = residency_of(world, [model])
    try:
        with residency.on_device(model.role, Part.PARAMS):
            weight = next(iter(model.params().values()))
            weight.data = weight.data.clone()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def numpy_view(world: World, language: str) -> str:
    """What is said when NumPy holds a view of a weight that is to leave."""
    model = make_role(world, language)
    residency = residency_of(world, [model])
    try:
        with residency.on_device(model.role, Part.PARAMS):
            next(iter(model.params().values())).detach().numpy()
        residency.all_off()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def saved_between_stages(world: World, language: str, value: str, target: str) -> bool:
    """Whether what is saved after all was offloaded and reloaded is what training left."""
    actor, critic = actor_and_critic(world, language, value, "bf16", True)
    residency = residency_of(world, [actor, critic])
    with residency.on_device(Role.ACTOR, TRAINING):
        train_step(actor, BATCH, 1e-3)
        truth = exported(actor)
    with residency.on_device(Role.CRITIC, TRAINING):
        regress(critic, BATCH)
    residency.all_off()
    with residency.on_device(Role.ACTOR, Part.PARAMS):
        actor.save(target)
    with safe_open(f"{target}/model.safetensors", "pt") as saved:
        return all(torch.equal(saved.get_tensor(name), tensor) for name, tensor in truth.items())


def swaps_by_schedule(world: World, language: str, value: str, room_for: int | None, exports: bool = False) -> dict[str, Any]:
    """Three iterations of actor, draft heads and critic by PPO's schedule, with a budget that has room for so many visits, or none.
    With exports after each, which are not in the schedule, though the visits look like those that are.

    peak: most bytes of parts on the device at once.  visit: bytes of the largest visit.  bucket: of the largest storage.
    early: parts that were on their way before they were asked for.  spans: name, track, seconds and arguments of each in the trace.
    counted: after each visit what the trace's counters say is on the device, and what is.
    """
    models = actor_and_critic(world, language, value, "bf16", True)
    heads = draft_heads(models[0], HEADS, OPTIM)
    trace = Trace(num_iterations=1)
    states = {model.role: ModelState.of(model, CHUNK_BYTES) for model in (*models, heads)}
    visits = ppo_visits(Role.ACTOR, Role.CRITIC, [], heads=Role.MEDUSA)
    largest = max(sum(states[role].num_bytes(part) for role, part in visit.wanted()) for visit in visits)
    storages = [arena.num_bytes for state in states.values() for arenas in state.arenas.values() for arena in arenas]
    budget = None if room_for is None else room_for * largest
    residency = Residency(world, states.values(), Ledger(), device_budget_bytes=budget, schedule=visits, trace=trace)
    trace.begin_iteration()
    residency._mover.peak_bytes = 0  # of the start, where each role is built on the device
    early: list[str] = []
    counted: list[tuple[float, int]] = []
    named = [(visit, None) for visit in visits]
    if exports:
        named += [(visits[0], Visit(Role.CRITIC, Part.PARAMS)), (Visit(Role.CRITIC, Part.PARAMS), EMPTY)]
    with poisoned(copy_seconds=1e-3):
        for visit, following in named * 3:
            if visit.role is None:
                residency.all_off()
                continue
            early += [holding.name for holding in residency._holdings.values() if holding.in_flight]
            with residency.on_device(visit.role, visit.parts, following, beside=visit.beside):
                for claim in visit.claims():
                    if claim.updates:
                        one_step(states[claim.role].model)
            counted.append((sum(trace._counters.values()), residency.resident_bytes))
    residency.all_off()
    moved, minimum = residency.ledger.moved(), residency.ledger.minimum()
    spans = [(span.name, span.track, span.end - span.start, dict(span.args)) for span in trace.iteration_spans()]
    sizes = dict(peak=residency.peak_bytes, visit=largest, bucket=max(storages))
    return sizes | dict(early=early, moved=moved, minimum=minimum, spans=spans, counted=counted)


def planned_settings(
    world: World, language: str, value: str, share: bool = False, mode: str = "ppo"
) -> tuple[Settings, dict[Role, str]]:
    """Settings of a run with four roles and draft heads, and the directories of the four."""
    settings = Settings(
        trainer=Trainer(mode=mode, device="cpu", dtype="bf16"),
        parallel=Parallel(
            tensor=world.grid.tensor,
            context=world.grid.context,
            pipeline=world.grid.pipeline,
            virtual_pipeline=world.grid.virtual,
        ),
        offload=Offload(share_host_copies=share),
        medusa=HEADS,
    )
    return settings, {Role.ACTOR: language, Role.CRITIC: value, Role.REFERENCE: language, Role.REWARD: value}


def small_host(world: World, language: str, value: str, available_bytes: int) -> str:
    """What is said where the host has `available_bytes` to give."""
    settings, paths = planned_settings(world, language, value)
    sizes, visits = planned_bytes(settings, paths, Place.of(world.grid)), planned_visits(settings, paths)
    needs = host_needs(sizes, visits, 1, offload=True, on_cpu=True)
    try:
        refuse_small_host(world, needs, available_bytes)
    except ConfigError as error:
        return f"ConfigError: {error}"
    return "nothing"


def planned_and_taken(world: World, language: str, value: str, share: bool, mode: str = "ppo") -> tuple[int, int]:
    """Bytes of host copies on this rank: by the plan, and as the Residency has them once all roles are built."""
    settings, paths = planned_settings(world, language, value, share, mode)
    sharing = world.grid.copies if share else 1
    sizes, visits = planned_bytes(settings, paths, Place.of(world.grid)), planned_visits(settings, paths)
    needs = host_needs(sizes, visits, sharing, offload=True, on_cpu=False)
    residency = plan_residency(settings, paths, world)
    optim = OPTIM if settings.trainer.trains else None
    for role, path in paths.items():
        head = "value" if role in (Role.CRITIC, Role.REWARD) else "language"
        model = build_role(role, head, path, settings, world, optim if role in (Role.ACTOR, Role.CRITIC) else None)
        residency.adopt(ModelState.of(model))
    residency.adopt(ModelState.of(draft_heads(residency.state(Role.ACTOR).model, settings.medusa, optim)))
    assert residency.resident_bytes == 0
    return needs.total(), residency.host_bytes


def residue_of_cpu_rank(world: World, language: str) -> tuple[dict[str, int], int, str]:
    """Bytes by owner after a step with everything off, the memory of the process, and the table."""
    model = make_role(world, language, optim=OPTIM)
    residency = residency_of(world, [model])
    with residency.on_device(model.role, TRAINING):
        one_step(model)
    residency.all_off()
    owners = residue(residency.resident_bytes, residency.host_bytes, world.device)
    resident = next(line for line in open("/proc/self/status") if line.startswith("VmRSS:"))
    return owners, int(resident.split()[1]) * 1024, residency.residue()

"""What the tests of plan/ run on ranks (see tests/ranks.py): the bytes of real models beside those of a plan."""

from __future__ import annotations

from typing import get_args

from models.activations_on_ranks import counted_in_one_micro_batch
from offload.draft_heads import draft_heads

from rlhf_mc.batch import SequenceBatch
from rlhf_mc.config import Actor, Critic, Data, Medusa, MicroBatch, Optim, Parallel, Recompute, RewardModel, Rollout, Settings, Trainer
from rlhf_mc.models.activations import saved_bytes
from rlhf_mc.models.role import build_role
from rlhf_mc.models.roles import TRAINED_ROLES, VALUE_ROLES, Role, role_paths
from rlhf_mc.offload import Ledger, ModelState, Part, Residency
from rlhf_mc.parallel.world import World
from rlhf_mc.plan.case import Case
from rlhf_mc.plan.machine import Machine
from rlhf_mc.plan.memory import PART_OWNERS, device_memory, host_memory

OPTIM = Optim(lr=1e-3)


def settings_for(
    world: World,
    language: str,
    value: str,
    dtype: str,
    distributed: bool,
    recompute: Recompute = "none",
    length: int = 128,
    heads: bool = True,
) -> Settings:
    """All four roles, and draft heads where asked, on the grid of `world`; micro-batches of two sequences of `length` tokens."""
    grid, budget = world.grid, MicroBatch(tokens=2 * length)
    return Settings(
        trainer=Trainer(device="cpu", dtype=dtype, recompute=recompute),
        parallel=Parallel(
            tensor=grid.tensor,
            context=grid.context,
            pipeline=grid.pipeline,
            virtual_pipeline=grid.virtual,
            distributed_optimizer=distributed,
        ),
        data=Data(max_prompt_tokens=1, prompts_per_iteration=8),
        rollout=Rollout(max_tokens=length - 1),
        actor=Actor(path=language, optim=OPTIM, micro_batch=budget),
        critic=Critic(path=value, optim=OPTIM, micro_batch=budget),
        reward_model=RewardModel(path=value),
        medusa=Medusa(enabled=heads, num_heads=2),
    )


def states_found_and_planned(world: World, language: str, value: str, dtype: str, distributed: bool) -> dict[str, tuple]:
    """For each stage, bytes of the parts that it claims, as real roles have them, and as its plan; and those of all host copies."""
    settings = settings_for(world, language, value, dtype, distributed)
    models = {}
    for role, path in role_paths(settings).items():
        head = "value" if role in VALUE_ROLES else "language"
        models[role] = build_role(role, head, path, settings, world, OPTIM if role in TRAINED_ROLES else None)
    models[Role.MEDUSA] = draft_heads(models[Role.ACTOR], settings.medusa, OPTIM, distributed)
    states = {role: ModelState.of(model) for role, model in models.items()}
    real = {role: state.role_bytes() for role, state in states.items()}
    case = Case.of(settings, Machine.cpu(world.size, world.size, 2**34))
    found = {}
    for stage in case.stages:
        counted = {owner: 0 for owner in PART_OWNERS.values()}
        for role, part in stage.visit.wanted():
            counted[PART_OWNERS[part]] += real[role].parts[part]
        planned = device_memory(case, stage, world.grid.stage).owners
        found[stage.name] = counted, {owner: planned.get(owner, 0) for owner in counted}
    residency = Residency(world, list(states.values()), Ledger())
    of_parts = tuple(PART_OWNERS.values())
    planned_copies = sum(num_bytes // world.size for use, num_bytes in host_memory(case).items() if use.endswith(of_parts))
    copies = sum(size.parts[part] for size in real.values() for part in Part if part is not Part.GRADS)
    found["host"] = residency.host_bytes, copies, planned_copies
    return found


def activations_counted_and_planned(world: World, language: str, value: str, batch: SequenceBatch) -> dict[tuple[str, str], tuple[int, int]]:
    """By stage and recomputing: bytes that autograd keeps of a full micro-batch, counted, and as the plan has them."""
    found = {}
    for recompute in get_args(Recompute):
        settings = settings_for(world, language, value, "fp32", True, recompute, int(batch.lengths[0]), heads=False)
        case = Case.of(settings, Machine.cpu(world.size, world.size, 2**34))
        for stage in (stage for stage in case.stages if stage.kind == "train"):
            head = "value" if stage.role in VALUE_ROLES else "language"
            model = build_role(stage.role, head, role_paths(settings)[stage.role], settings, world, OPTIM)
            planned = saved_bytes(case.layers(stage, world.grid.stage), case.tokens(stage))
            found[stage.name, recompute] = counted_in_one_micro_batch(model, batch), planned
    return found

"""Rehearsed jobs: the 70B recipe as ranks of 64 and of 1,024, small models on other layouts, and faults that the comparison must see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_mc.config import ConfigError, Settings
from rlhf_mc.models.roles import Role
from rlhf_mc.offload.parts import Part
from rlhf_mc.parallel.reshard import Share
from rlhf_mc.recipe import load_settings
from rlhf_mc.rehearsal.rehearse import Rehearsed, faults, peers_of, rehearse_rank
from rlhf_mc.rehearsal.view import View

CONFIGS = Path(__file__).resolve().parents[2] / "scripts" / "configs"
TINY = ["parallel.tensor=2", "parallel.pipeline=2", "rollout.tensor_parallel=1", "data.max_prompt_tokens=64", "rollout.max_tokens=128"]
TINY += [f"{role}.scoring_micro_batch.tokens=256" for role in ("actor", "critic", "reference", "reward_model")]
TINY += ["actor.micro_batch.tokens=256", "critic.micro_batch.tokens=256", "rollout.samples_per_prompt=2"]
TINY += ["data.prompts_per_iteration=32", "algorithm.mini_batch_sequences=32"]
PLAIN = ["parallel.distributed_optimizer=false", "trainer.dtype=fp32"]
VIRTUAL = ["parallel.virtual_pipeline=2", "parallel.context=2"]
# Chunks of layers, context ranks, draft heads, tied and untied; engines apart; models that stay; the plain optimizer; two engines a copy.
LAYOUTS = [
    ("llama", 64, []),
    ("qwen2", 64, [*VIRTUAL, "medusa.enabled=true", "medusa.num_heads=2", "rollout.tensor_parallel=2"]),
    ("qwen3", 48, ["rollout.placement=separate", "rollout.engine_ranks=16", "offload.share_host_copies=false"]),
    ("llama", 8, ["offload.enabled=false", "offload.share_host_copies=false", *PLAIN]),
]


def llama_70b() -> Settings:
    paths = [f"{role}.path={CONFIGS / 'shapes' / 'llama3_70b'}" for role in ("actor", "critic", "reward_model")]
    return load_settings(["--config", str(CONFIGS / "ppo_llama3_70b.yaml"), *paths], "train")[0]


def tiny(language: str, value: str, overrides: list[str]) -> Settings:
    paths = [f"actor.path={language}", f"critic.path={value}", f"reward_model.path={value}"]
    return load_settings(["--config", str(CONFIGS / "ppo_llama3_70b.yaml"), *paths, *TINY, *overrides], "train")[0]


@pytest.mark.parametrize("size, rank", [(64, 63), (1024, 37)])
def test_a_rank_of_the_70b_recipe_agrees_with_its_peers(size: int, rank: int) -> None:
    settings = llama_70b()
    one = rehearse_rank(settings, size, rank, ranks_per_node=8)
    peers = peers_of(settings, size, one)
    assert sorted(view.rank for view in (one.view, *peers)) == list(one.built.expected["model"]), "all ranks of one copy of the model"
    assert list(faults(settings, size, [one], [peers])) == []
    assert len(one.built.groups["copies"]) == size // 16 and len(one.built.groups["neighbours"]) == 2
    assert sum(one.built.moved.values()) > 2**30, "states did move"
    assert len(one.view.rollout.hands) == size // 8


@pytest.mark.parametrize("family, size, overrides", LAYOUTS)
def test_other_layouts(language_model, value_model, family: str, size: int, overrides: list[str]) -> None:
    settings = tiny(language_model(family), value_model(family), overrides)
    rehearsed = [rehearse_rank(settings, size, rank, ranks_per_node=8) for rank in (0, size // 2, size - 1)]
    peers = [peers_of(settings, size, one) for one in rehearsed]
    assert list(faults(settings, size, rehearsed, peers)) == []
    assert (Role.MEDUSA in rehearsed[0].built.built) == settings.medusa.enabled
    assert (rehearsed[-1].built is None) == bool(settings.rollout.engine_ranks), "an engine's rank builds no models"


def without_a_slice(shares: tuple[Share, ...], end: str) -> tuple[Share, ...]:
    """One slice less in the first bucket that has one at this end."""
    number = next(n for n, share in enumerate(shares) if getattr(share, end))
    return (*shares[:number], replace(shares[number], **{end: getattr(shares[number], end)[1:]}), *shares[number + 1 :])


def swapped(shares: tuple[Share, ...]) -> tuple[Share, ...]:
    """Two slices of one sender in the other order."""
    first, *others = shares
    received = [*first.receives]
    one = next(n for n, block in enumerate(received) if any(block.source == later.source for later in received[n + 1 :]))
    other = next(n for n, block in enumerate(received) if n > one and block.source == received[one].source)
    received[one], received[other] = received[other], received[one]
    return (replace(first, receives=tuple(received)), *others)


def with_sync(view: View, change: Callable[[tuple[Share, ...]], tuple[Share, ...]]) -> View:
    return replace(view, sync=replace(view.sync, shares=change(view.sync.shares)))


def with_pass(view: View, name: str, change: Callable[[list], list]) -> View:
    return replace(view, passes=view.passes | {name: change(view.passes[name])})


def fewer(plan: list) -> list:
    return [plan[0][:-1], *plan[1:]]


def fewer_samples(hands: list) -> list:
    return [hands[0][1:], *hands[1:]]


VIEW_FAULTS = [
    (lambda view: with_sync(view, lambda shares: without_a_slice(shares, "sends")), "weight sync: in bucket"),
    (lambda view: with_sync(view, lambda shares: without_a_slice(shares, "receives")), "weight sync: position"),
    (lambda view: with_sync(view, lambda shares: without_a_slice(shares, "local")), "elements of"),
    (lambda view: with_sync(view, swapped), "in another order"),
    (lambda view: with_sync(view, lambda shares: shares[:-1]), "buckets"),
    (lambda view: with_pass(view, "train actor 0.0", fewer), "collectives would hang"),
    (lambda view: with_pass(view, "score critic", lambda plan: plan[::-1]), "micro-batches: rank"),
    (lambda view: replace(view, rollout=replace(view.rollout, hands=fewer_samples(view.rollout.hands))), "not dealt once"),
]


@pytest.fixture(scope="module")
def job(language_model, value_model) -> tuple[Settings, Rehearsed, list[View]]:
    settings = tiny(language_model("llama"), value_model("llama"), [])
    one = rehearse_rank(settings, 8, 3, ranks_per_node=8)
    return settings, one, peers_of(settings, 8, one)


@pytest.mark.parametrize("change, told", VIEW_FAULTS, ids=[told for _, told in VIEW_FAULTS])
def test_a_rank_that_plans_otherwise_is_noticed(job, change: Callable[[View], View], told: str) -> None:
    settings, one, peers = job
    assert list(faults(settings, 8, [one], [peers])) == []
    found = list(faults(settings, 8, [replace(one, view=change(one.view))], [peers]))
    assert any(told in fault for fault in found), found


def test_a_rank_that_builds_otherwise_is_noticed(job) -> None:
    settings, one, peers = job
    built = one.built
    moved = dict(built.moved)
    moved[next(iter(moved))] -= 1
    parts = {**built.built[Role.CRITIC].parts, Part.GRADS: 0}
    changes = {
        "group, the grid says": replace(built, groups=built.groups | {"tensor": (3, 2)}),
        "is not in its": replace(built, groups=built.groups | {"neighbours": (1, 5)}),
        "the least is": replace(built, moved=moved),
        "critic was built with": replace(built, built=built.built | {Role.CRITIC: replace(built.built[Role.CRITIC], parts=parts)}),
    }
    for told, changed in changes.items():
        found = list(faults(settings, 8, [replace(one, built=changed)], [peers]))
        assert len(found) == 1 or told == "is not in its", found
        assert told in found[0]


def test_what_cannot_be_rehearsed_is_a_wrong_setting(job) -> None:
    with pytest.raises(ConfigError, match="not one of the 8 ranks"):
        rehearse_rank(job[0], 8, 8, ranks_per_node=8)
    with pytest.raises(ConfigError, match="cannot be divided"):
        rehearse_rank(job[0], 6, 0, ranks_per_node=8)

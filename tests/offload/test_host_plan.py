"""A host too small for the plan is refused before anything is built, on every rank, with the table of what needs what."""

from __future__ import annotations

import pytest
from ranks import Layout


def test_a_host_that_is_too_small_is_refused_on_every_rank(ranks, language_model, value_model):
    models = dict(language=language_model("llama"), value=value_model("llama"))
    messages = ranks.run("offload.on_ranks:small_host", Layout(data=2), available_bytes=1 << 20, **models)
    assert messages[0] == messages[1]
    message = messages[0]
    assert message.startswith("ConfigError: offload: the models need") and "which has 1.00 MiB to give" in message
    assert "offload.share_host_copies=true" in message
    assert all(f"{role}: host copy" in message for role in ("actor", "critic", "reference", "reward_model", "medusa"))
    assert "actor and medusa: while on the device" in message and "bytes of 2 ranks" in message


@pytest.mark.parametrize("layout", [Layout(), Layout(data=2), Layout(tensor=2)], ids=str)
@pytest.mark.parametrize("share", [False, True])
def test_the_plan_is_what_is_then_taken(ranks, language_model, value_model, layout, share):
    models = dict(language=language_model("llama"), value=value_model("llama"))
    for planned, taken in ranks.run("offload.on_ranks:planned_and_taken", layout, share=share, **models):
        assert planned == taken > 0


def test_rollouts_alone_are_planned_without_optimizers(ranks, language_model, value_model):
    arguments = dict(language=language_model("llama"), value=value_model("llama"), share=False)
    ((whole, _),) = ranks.run("offload.on_ranks:planned_and_taken", **arguments)
    ((planned, taken),) = ranks.run("offload.on_ranks:planned_and_taken", mode="rollout", **arguments)
    assert planned == taken < whole / 2


def test_the_residue_names_every_owner_and_adds_up(ranks, language_model):
    ((owners, resident, table),) = ranks.run("offload.on_ranks:residue_of_cpu_rank", language=language_model("llama"))
    assert owners["states of roles"] == 0 and owners["megatron's global buffers"] == 0
    assert owners["host copies"] > 0
    assert abs(sum(owners.values()) - resident) < 32 << 20
    assert "left on the device" in table and all(owner in table for owner in owners)

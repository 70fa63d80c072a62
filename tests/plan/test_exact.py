"""A plan's bytes are those of real models on CPU ranks: states to the byte, activations within a tenth."""

from __future__ import annotations

import pytest
from ranks import Layout, RankPool
from tiny_models import random_batch

LAYOUTS = [Layout(), Layout(tensor=2), Layout(pipeline=2), Layout(data=2), Layout(tensor=2, pipeline=2), Layout(pipeline=2, virtual=2)]
# Tied and untied, biases, norms of queries and keys; both optimizers; both precisions.
CASES = [("llama", "bf16", True), ("qwen2", "fp32", True), ("qwen3", "bf16", False)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_states_by_stage_and_on_the_host(ranks: RankPool, language_model, value_model, layout: Layout) -> None:
    """Of the first copy of each shard; other copies may step a few elements less."""
    for family, dtype, distributed in CASES:
        arguments = dict(language=language_model(family), value=value_model(family), dtype=dtype, distributed=distributed)
        for rank, found in enumerate(ranks.run("plan.on_ranks:states_found_and_planned", layout, **arguments)):
            taken, parts, planned = found.pop("host")
            assert taken == parts <= planned, (family, rank)
            assert planned == parts or layout.size > 1, "a node is planned as if all its ranks held what the fullest does"
            assert {"sync weights", "generate", "score reference", "score critic", "train critic", "train actor"} <= found.keys()
            for stage, (counted, plan) in found.items():
                if rank // layout.tensor % layout.data == 0:
                    assert counted == plan, (family, dtype, rank, stage)
                else:
                    assert sum(counted.values()) <= sum(plan.values()), (family, dtype, rank, stage)
            assert all(found["train actor"][1].values()) or dtype == "fp32", "nothing is left out"


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(tensor=2, pipeline=2), Layout(context=2)], ids=str)
def test_activations(ranks: RankPool, language_model, value_model, layout: Layout) -> None:
    arguments = dict(language=language_model("llama"), value=value_model("qwen3"), batch=random_batch([120, 120]))
    for rank, found in enumerate(ranks.run("plan.on_ranks:activations_counted_and_planned", layout, **arguments)):
        assert len(found) == 6
        for what, (counted, planned) in found.items():
            assert 0.9 * counted <= planned <= 1.1 * counted, (rank, what, counted, planned)

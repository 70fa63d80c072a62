"""Bytes predicted from config.json and the layout are those that the state has."""

from __future__ import annotations

import pytest
from ranks import Layout

LAYOUTS = [Layout(), Layout(data=2), Layout(context=2), Layout(tensor=2), Layout(pipeline=2)]
LAYOUTS += [Layout(pipeline=2, virtual=2, data=2)]


# A tied and an untied model, with biases and with norms of queries and keys; each optimizer in each precision.
CASES = [("llama", "fp32", True), ("llama", "bf16", True), ("qwen2", "bf16", True), ("qwen3", "fp32", False), ("llama", "bf16", False)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_part_has_the_bytes_that_were_predicted(ranks, language_model, value_model, layout):
    for family, dtype, distributed in CASES:
        arguments = dict(language=language_model(family), value=value_model(family), dtype=dtype, distributed=distributed)
        for rank, roles in enumerate(ranks.run("offload.on_ranks:measured_and_predicted_bytes", layout, **arguments)):
            for role, found, predicted in roles:
                assert found == predicted, (family, dtype, distributed, rank, role)

"""Bytes predicted from config.json and the layout are those that the state has."""

from __future__ import annotations

import pytest
from ranks import Layout

LAYOUTS = [Layout(), Layout(data=2), Layout(tensor=2), Layout(pipeline=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_part_has_the_bytes_that_were_predicted(ranks, language_model, value_model, layout):
    for distributed in (False, True):
        for dtype in ("fp32", "bf16"):
            for family in ("llama", "qwen2", "qwen3"):
                arguments = dict(language=language_model(family), value=value_model(family), dtype=dtype, distributed=distributed)
                for rank, roles in enumerate(ranks.run("offload.on_ranks:measured_and_predicted_bytes", layout, **arguments)):
                    for role, found, predicted in roles:
                        assert found == predicted, (family, dtype, distributed, rank, role)

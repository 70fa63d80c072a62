"""Training with offload between every two stages is the training without, bit for bit, in memory that is poisoned when freed."""

from __future__ import annotations

import pytest
from ranks import Layout

CASES = [
    pytest.param(Layout(), 20, dtype, distributed, False, id=f"1rank-{dtype}-{'distributed' if distributed else 'plain'}")
    for dtype in ("fp32", "bf16")
    for distributed in (False, True)
] + [
    pytest.param(Layout(data=2), 5, "bf16", True, False, id="DP2-bf16-distributed"),
    pytest.param(Layout(data=2), 5, "bf16", True, True, id="DP2-bf16-distributed-shared"),
    pytest.param(Layout(data=2), 5, "fp32", False, True, id="DP2-fp32-plain-shared"),
    pytest.param(Layout(context=2), 3, "bf16", True, True, id="CP2-bf16-distributed-shared"),
    pytest.param(Layout(tensor=2), 3, "bf16", False, False, id="TP2-bf16-plain"),
    pytest.param(Layout(pipeline=2), 3, "bf16", True, False, id="PP2-bf16-distributed"),
    pytest.param(Layout(pipeline=2, virtual=2), 3, "bf16", True, False, id="PP2xVP2-bf16-distributed"),
    pytest.param(Layout(pipeline=2, virtual=2, data=2), 3, "bf16", True, True, id="PP2xVP2xDP2-bf16-distributed-shared"),
]


@pytest.mark.parametrize(("layout", "steps", "dtype", "distributed", "share"), CASES)
def test_offload_changes_no_bit_of_training(ranks, language_model, value_model, layout, steps, dtype, distributed, share):
    arguments = dict(language=language_model("llama"), value=value_model("qwen2"), dtype=dtype, distributed=distributed)
    different = ranks.run("offload.on_ranks:compare_training", layout, steps=steps, share=share, **arguments)
    assert different == [[]] * layout.size


def test_what_is_saved_after_offload_is_what_training_left(ranks, language_model, value_model, tmp_path):
    models = dict(language=language_model("llama"), value=value_model("llama"))
    assert ranks.run("offload.on_ranks:saved_between_stages", target=str(tmp_path / "saved"), **models) == [True]

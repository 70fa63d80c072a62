"""What a save writes is the state of its moment, bit for bit, whatever moves meanwhile; freed memory is poisoned, and copies come late."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import Layout

CASES = [
    pytest.param(Layout(), dict(dtype="fp32", distributed=False), id="1rank-fp32-plain"),
    pytest.param(Layout(), dict(dtype="bf16", distributed=True), id="1rank-bf16"),
    pytest.param(Layout(data=2), dict(dtype="fp32", distributed=True), id="DP2-fp32"),
    pytest.param(Layout(data=2), dict(dtype="fp32", distributed=False, share=True), id="DP2-fp32-plain-shared"),
    pytest.param(Layout(data=2), dict(dtype="bf16", distributed=True, share=True), id="DP2-bf16-shared"),
]


@pytest.fixture
def arguments(language_model, value_model, tmp_path) -> dict[str, Any]:
    return dict(language=language_model("llama"), value=value_model("qwen2"), directory=str(tmp_path))


@pytest.mark.parametrize(("layout", "options"), CASES)
def test_a_save_amid_copies_in_flight_is_the_live_state(ranks, arguments, layout, options):
    answers = ranks.run("checkpoint.live_on_ranks:saved_in_flight", layout, **arguments, **options)
    assert [faults for faults, _ in answers] == [[]] * layout.size
    assert answers[0][1] >= 10, "too few files were compared"


@pytest.mark.parametrize(("layout", "options"), CASES)
def test_two_saves_in_a_row_are_two_states(ranks, arguments, layout, options):
    answers = ranks.run("checkpoint.live_on_ranks:saved_twice", layout, **arguments, **options)
    assert answers == [([], [])] * layout.size

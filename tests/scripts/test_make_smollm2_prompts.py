"""The prompts of the SmolLM2 recipe carry what their reward functions read."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import make_smollm2_prompts
import pytest

from rlhf_mc.rewards import builtin
from rlhf_mc.rewards.interface import RewardSample


FUNCTIONS = {
    "explain": builtin.plain_words,
    "keywords": builtin.keywords,
    "arithmetic": partial(builtin.final_answer, answer_field="answer", pattern=r"(-?\d+)"),
}


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def score(row: dict, response: str) -> float:
    return FUNCTIONS[row["data_source"]](RewardSample(prompt="", response=response, prompt_ids=[], response_ids=[1], row=row))


def test_files_share_no_row_mix_the_kinds_and_are_reproducible(tmp_path: Path):
    for name in ("a", "b"):
        make_smollm2_prompts.main([str(tmp_path / name), "--num-train", "90", "--num-validation", "30"])
    train, validation = (read(tmp_path / "a" / f"{name}.jsonl") for name in ("prompts", "validation"))
    contents = [row["prompt"][0]["content"] for row in train + validation]
    assert len(set(contents)) == len(contents) == 120
    for rows in (train, validation):
        assert all(sum(row["data_source"] == kind for row in rows) == len(rows) // 3 for kind in FUNCTIONS)
    for name in ("prompts.jsonl", "validation.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_right_response_scores_full_and_a_wrong_one_less():
    for row in make_smollm2_prompts.keyword_rows():
        a, b = row["keywords"]
        assert score(row, f"The {a} is by the {b}.") == 1.0
        assert score(row, f"The {a} is here.") == 0.5
    for row in make_smollm2_prompts.arithmetic_rows():
        value = eval(row["prompt"][0]["content"].removeprefix("What is ").partition("?")[0])
        assert score(row, f"The answer is {value}.") == 1.0
        assert score(row, str(value + 1)) == 0.0
    row = make_smollm2_prompts.explain_rows()[0]
    plain, learned = "It is a hill. Hot rock comes out of it.", "Stratovolcanic magmatism characterises explosive phenomena."
    assert score(row, plain) > score(row, learned)


def test_more_rows_than_there_are_is_an_error():
    with pytest.raises(SystemExit, match="rows were asked for"):
        make_smollm2_prompts.draw_rows(10_000, seed=1)

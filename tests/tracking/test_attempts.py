"""The attempts of a run, and its goodput, from its files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from rlhf_mc.tracking.attempts import Attempts


def logged(directory: Path, *seconds: float) -> None:
    with open(directory / "metrics.jsonl", "a") as file:
        for iteration, spent in enumerate(seconds):
            file.write(json.dumps({"iteration": iteration, "timing_s/step": spent}) + "\n")


def test_an_attempt_that_ended_without_a_word_lasted_until_its_last_sign(tmp_path) -> None:
    first = Attempts(tmp_path)
    path = tmp_path / "attempts.jsonl"
    began = json.loads(path.read_text())["began"]
    assert began == pytest.approx(time.time(), abs=5)
    os.utime(path, (began + 60, began + 60))
    second = Attempts(tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[1] == {"ended": pytest.approx(began + 60, abs=0.01), "how": "no word"} and list(lines[2]) == ["began"]
    logged(tmp_path, 10.0, 20.0)
    goodput = second.goodput()
    assert (goodput.kept_seconds, goodput.num_attempts) == (30.0, 2) and 60 <= goodput.all_seconds < 70
    assert str(goodput).startswith("goodput: 0.") and goodput.share == pytest.approx(30 / goodput.all_seconds)
    second.end("done")
    Attempts(tmp_path).beat()
    assert [next(iter(json.loads(line))) for line in path.read_text().splitlines()] == ["began", "ended"] * 2 + ["began"]
    del first


def test_of_an_iteration_that_was_made_again_the_last_line_counts(tmp_path) -> None:
    attempts = Attempts(tmp_path)
    logged(tmp_path, 10.0, 20.0)
    logged(tmp_path, 1.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 7, "timing_s')
    assert attempts.goodput().kept_seconds == 21.0

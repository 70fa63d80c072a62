"""The files and the terminal output of a run, on rank 0 and on the others; wandb is switched off here."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from rlhf_mc.config import Settings, Trainer, Wandb
from rlhf_mc.recipe import load_settings
from rlhf_mc.tracking import Comparison, SampleRow, Tracker

from .programs import run_program


def settings_for(output_dir: Path) -> Settings:
    return Settings(trainer=Trainer(output_dir=str(output_dir)), wandb=Wandb(mode="disabled"))


def tracker_for(output_dir: Path) -> Tracker:
    return Tracker(settings_for(output_dir), rank=0, total=3)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is not JSON")) for line in path.read_text().splitlines()]


SAMPLES = [
    SampleRow("2 + 2 =", " 4\n", 1.5, {"exact": 1.0, "length": 2.0}, "stop"),
    SampleRow("3 + 3 =", " 7", float("nan"), {"exact": 0.0}, "length"),
]


def test_metrics_file_has_one_flushed_line_an_iteration(tmp_path: Path) -> None:
    tracker = tracker_for(tmp_path)
    tracker.log(1, {"critic/score/mean": torch.tensor(0.25), "n": 7})
    assert lines_of(tmp_path / "metrics.jsonl") == [{"iteration": 1, "critic/score/mean": 0.25, "n": 7}]
    tracker.log(2, {"critic/score/mean": 0.1 + 0.2})
    tracker.finish()
    assert lines_of(tmp_path / "metrics.jsonl")[1]["critic/score/mean"] == 0.1 + 0.2


def test_nonfinite_metrics_are_null_and_named(tmp_path: Path) -> None:
    with tracker_for(tmp_path) as tracker:
        tracker.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    assert lines_of(tmp_path / "metrics.jsonl") == [
        {"iteration": 1, "a": None, "b": None, "c": None, "d": 1.0, "nonfinite": {"a": "nan", "b": "inf", "c": "-inf"}}
    ]


def test_a_resumed_run_drops_what_it_makes_again(tmp_path: Path) -> None:
    with tracker_for(tmp_path) as tracker:
        for iteration in range(3):
            tracker.samples(iteration, SAMPLES, show=False)
            tracker.log(iteration, {"x": iteration})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 1, "x"')  # a line that a killed run did not write to its end
    with Tracker(settings_for(tmp_path), rank=0, total=3, start=2) as tracker:
        tracker.log(2, {"x": 20})
    assert lines_of(tmp_path / "metrics.jsonl") == [{"iteration": 0, "x": 0}, {"iteration": 1, "x": 1}, {"iteration": 2, "x": 20}]
    assert [row["iteration"] for row in lines_of(tmp_path / "samples.jsonl")] == [0, 0, 1, 1]
    assert not list(tmp_path.glob("*.partial"))


def test_a_later_tracker_appends(tmp_path: Path) -> None:
    for iteration in (1, 2):
        with tracker_for(tmp_path) as tracker:
            tracker.log(iteration, {"x": 1.0})
    assert [line["iteration"] for line in lines_of(tmp_path / "metrics.jsonl")] == [1, 2]


def test_an_iteration_is_logged_once_and_in_order(tmp_path: Path) -> None:
    with tracker_for(tmp_path) as tracker:
        tracker.log(4, {"x": 1.0})
        with pytest.raises(ValueError, match="iteration 4 after 4: log each once"):
            tracker.log(4, {"x": 1.0})
        with pytest.raises(ValueError, match="iteration 3 after 4"):
            tracker.samples(3, SAMPLES)
        tracker.samples(5, SAMPLES)
        with pytest.raises(ValueError, match="samples of iteration 5 wait.*iteration 6 came"):
            tracker.log(6, {"x": 1.0})
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 1


def test_samples_are_written_whole_and_shown_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = SampleRow("p" * 100 + "END", "r" * 200, 0.0)
    with tracker_for(tmp_path) as tracker:
        tracker.samples(1, [*SAMPLES, long])
        shown = capsys.readouterr().out
        tracker.log(1, {"x": 1.0})
        tracker.samples(2, SAMPLES, show=False)
        assert capsys.readouterr().out.count("2 + 2") == 0
    first, second, third = lines_of(tmp_path / "samples.jsonl")[:3]
    assert first["response"] == " 4\n" and first["parts"] == {"exact": 1.0, "length": 2.0} and first["finish_reason"] == "stop"
    assert second["score"] is None and second["iteration"] == 1
    assert third["response"] == long.response
    assert " 4\\n" in shown and "r" * 57 + "..." in shown and "r" * 58 not in shown and "pEND" in shown


def test_before_and_after_prints_writes_and_returns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Comparison("accuracy", 0.25, 0.75), Comparison("score", None, 2.0), Comparison("length", 10.0, 8.0)]
    with tracker_for(tmp_path) as tracker:
        table = tracker.before_and_after("Held-out, greedy", rows)
    assert table in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["title"] == "Held-out, greedy"
    assert [row["change"] for row in summary["rows"]] == [0.5, None, -2.0]
    assert table.splitlines() == [
        "Held-out, greedy",
        "          before   after   change",
        "---------------------------------",
        "accuracy  0.2500  0.7500  +0.5000",
        "score          -   2.000        -",
        "length     10.00   8.000   -2.000",
    ]


def test_saved_config_is_the_settings_again(tmp_path: Path) -> None:
    with tracker_for(tmp_path):
        pass
    settings, _ = load_settings(["--config", str(tmp_path / "config.yaml")])
    assert settings == settings_for(tmp_path)


def test_other_ranks_write_nothing_and_never_import_wandb(tmp_path: Path) -> None:
    program = f"""
import sys
from rlhf_mc.config import Settings, Trainer
from rlhf_mc.recipe import load_settings
from rlhf_mc.tracking import Comparison, SampleRow, Tracker
settings = Settings(trainer=Trainer(output_dir={str(tmp_path / "run")!r}))
with Tracker(settings, rank=1, total=1) as tracker:
    tracker.say("hello")
    tracker.samples(1, [SampleRow("p", "r", 1.0)])
    tracker.log(1, {{"x": 1.0}})
    tracker.before_and_after("title", [Comparison("x", 0.0, 1.0)])
    assert tracker.wandb_run_id is None
assert "wandb" not in sys.modules
"""
    done = run_program(program, dict(os.environ))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert not (tmp_path / "run").exists()


def test_say_shows_the_time_and_the_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tracker_for(tmp_path) as tracker:
        tracker.say("weights loaded")
    assert re.fullmatch(r"\[  0:\d\d\.\d\] weights loaded\n", capsys.readouterr().out)


def test_progress_bar_only_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tracker_for(tmp_path) as tracker:
        tracker.log(1, {"x": 1.0})
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with tracker_for(tmp_path) as tracker:
        tracker.log(1, {"critic/score/mean": 0.5})
    captured = capsys.readouterr()
    assert "1/3" in captured.err and "0.5000" in captured.out and "1/3" not in captured.out

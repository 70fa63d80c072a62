"""Pictures of a run: what they show, of which data, and what is said where data are missing. Traces are written by the real Trace."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from rlhf_mc.main import main
from rlhf_mc.tracking import Trace

MIB = 2**20


def metrics_line(iteration: int, **more: float | None) -> str:
    values = {"critic/score/mean": iteration / 2, "critic/score/min": -1.0, "critic/score/max": 5.0, "actor/entropy": 0.5}
    return json.dumps({"iteration": iteration, "timing_s/step": 3.0, "timing_s/generate": 1.0, **values, **more})


def traced(directory: Path, rank: int, device: bool = True) -> None:
    """Two iterations: in the first only a stage `early`, in the second, of 0.3 s, all kinds of rows."""
    trace = Trace(num_iterations=2)
    trace.begin_iteration()
    if device:
        trace.counter("device/reference", 3 * MIB)
    with trace.span("early"):
        pass
    trace.begin_iteration()
    begin = time.perf_counter()

    def add(name: str, start: float, end: float, track: str = "main", **args: str) -> None:
        trace.add(name, track, begin + start, begin + end, **args)

    add("make_experience", 0.0, 0.18)
    add("generate", 0.0, 0.06)
    for step in range(50):
        add("step", step / 1000, (step + 1) / 1000, "engine")
    add("score", 0.08, 0.18)
    add("score/critic", 0.08, 0.18)
    add("wait/copies", 0.08, 0.1, role="critic", part="params")
    add("update_actor", 0.2, 0.3)
    add("copy actor params", 0.2, 0.22, "copies/in", role="actor", part="params")
    time.sleep(0.2)
    if device:
        trace.counter("device/reference", 0)
        trace.counter("device/actor", 8 * MIB)
    time.sleep(0.1)
    trace.begin_iteration()
    with trace.span("late"):
        pass
    trace.write(directory / "trace" / f"rank{rank}.json", rank)


@pytest.fixture
def run(tmp_path) -> Path:
    directory = tmp_path / "recipe" / "ppo"
    directory.mkdir(parents=True)
    lines = [metrics_line(0), metrics_line(1), metrics_line(1, **{"val/accuracy": 0.75}), '{"iteration": 2, "critic/sco']
    (directory / "metrics.jsonl").write_text("\n".join(lines))
    traced(directory, 0)
    traced(directory, 1)
    return directory


def texts(path: Path) -> str:
    """All that is written in an SVG, a line for each text."""
    return "\n".join(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text()))


def test_both_pictures_show_what_the_run_left(run, capsys):
    assert main(["picture", str(run)]) == 0
    assert capsys.readouterr().out.split() == [str(run / "learning.svg"), str(run / "timeline.svg")]
    learned = texts(run / "learning.svg")
    assert "recipe/ppo: 2 iterations" in learned, "of two lines of one iteration the later one holds; a torn one is none"
    titles = ("held out: accuracy", "score of the samples", "entropy of the actor", "seconds of an iteration")
    assert all(title in learned for title in titles)
    assert not any(title in learned for title in ("critic explains", "drafts", "loss")), "a panel without data"
    times = texts(run / "timeline.svg")
    assert "an iteration on 2 of 2 ranks" in times and "early" not in times and "late" not in times
    names = ("rank 0: stages", "rank 1: stages", "engine's steps", "copies to the device", "update actor", "score critic")
    assert all(name in times for name in names)
    assert "disk" not in times and "make experience" not in times, "rows without bars, or stages around others"
    assert "on the device of rank 0" in times and "8.00 MiB" in times, "the roles take turns: never 11"
    assert not list(run.glob(".*")), "left beside the pictures"


def test_the_evaluation_before_the_run_is_shown_where_it_has_ended(run):
    def shown() -> int:
        assert main(["picture", str(run)]) == 0
        panel = (run / "learning.svg").read_text().split("held out: accuracy")[0]
        return panel.count("<use") - len(re.findall("tick", panel))

    unfinished = shown()
    rows = [{"label": "accuracy", "before": 0.25, "after": 0.75}, {"label": "draft_speedup", "before": None, "after": 2.0}]
    (run / "summary.json").write_text(json.dumps({"rows": rows}))
    assert shown() > unfinished


def test_the_same_run_gives_the_same_bytes(run, tmp_path):
    pictures = []
    for place in ("a", "b"):
        assert main(["picture", str(run), "--to", str(tmp_path / place)]) == 0
        pictures.append([(tmp_path / place / f"{name}.svg").read_bytes() for name in ("learning", "timeline")])
    assert pictures[0] == pictures[1]
    assert len(pictures[0][1]) < 100_000, "fifty steps of the engine are one bar"


def test_ranks_can_be_chosen_and_pictures_be_png(run):
    assert main(["picture", str(run), "--ranks", "1", "--png"]) == 0
    assert all((run / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("learning", "timeline"))
    assert main(["picture", str(run), "--ranks", "1"]) == 0
    assert "rank 0" not in texts(run / "timeline.svg")


def test_traces_that_count_no_memory_have_none_below(run):
    traced(run, 0, device=False)
    assert main(["picture", str(run)]) == 0
    assert "rank 0: stages" in (times := texts(run / "timeline.svg")) and "on the device of rank" not in times


def test_metrics_that_were_not_finite_leave_a_gap(run):
    lines = [metrics_line(0), metrics_line(1, **{"actor/entropy": None, "timing_s/step": None}), metrics_line(2, **{"critic/grad_norm": None})]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["picture", str(run)]) == 0
    learned = texts(run / "learning.svg")
    assert "recipe/ppo: 3 iterations" in learned and "entropy of the actor" in learned and "gradient norm" not in learned


@pytest.mark.parametrize("damage", ["", "[]", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X"}]}'])
def test_a_trace_that_is_none_is_named_and_the_other_picture_made(run, capsys, damage):
    (run / "trace" / "rank1.json").write_text(damage)
    assert main(["picture", str(run)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == str(run / "learning.svg")
    assert second == f"no timeline.svg: {run}/trace/rank1.json: it is no trace of a rank, or an empty one"


def test_runs_without_traces_or_iterations_say_so(run, capsys):
    for file in (run / "trace").iterdir():
        file.unlink()
    (run / "metrics.jsonl").write_text("")
    assert main(["picture", str(run)]) == 0
    out = capsys.readouterr().out
    assert "no learning.svg: metrics.jsonl has no iteration yet" in out
    assert f"no timeline.svg: {run}/trace has no trace; a PPO run leaves one at its end, unless trainer.trace_iterations is 0" in out


def test_what_cannot_be_drawn_is_refused_with_the_fix(run, capsys):
    (run / "file").touch()
    cases = {
        (str(run / "nothing"),): "nothing: it has no metrics.jsonl; name the trainer.output_dir of a run",
        (str(run), "--ranks", "0", "7"): "has no trace of rank 7; it has those of 0, 1",
        (str(run), "--to", str(run / "file")): "cannot be written: ",
    }
    for arguments, message in cases.items():
        assert main(["picture", *arguments]) == 2
        assert message in capsys.readouterr().err

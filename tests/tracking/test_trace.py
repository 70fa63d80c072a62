"""The trace: what the file says, that viewers can nest its spans, threads, bounds on memory, and what a failure leaves."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mc.tracking import Span, Trace
from rlhf_mc.tracking.trace import TRACKS, chrome_events

REQUIRED = {
    "M": {"name", "ph", "ts", "pid", "tid", "args"},
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "cat", "ph", "s", "ts", "pid", "tid", "args"},
    "C": {"name", "ph", "ts", "pid", "tid", "args"},
}


def written(trace: Trace, directory: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The events of the file, which must be strict JSON with the fields that its kind of event needs."""
    path = directory / "trace" / f"rank{rank}.json"
    trace.write(path, rank)
    events = json.loads(path.read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))["traceEvents"]
    assert all(event.keys() == REQUIRED[event["ph"]] for event in events)
    assert all(type(event["ts"]) is int and event.get("dur", 0) >= 0 for event in events)
    return events


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == kind]


def assert_nested(events: list[dict[str, Any]]) -> None:
    """As a viewer reads them, in the order of the file: on one tid, each span lies in the one that is open, or after it."""
    open_spans: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in of_kind(events, "X"):
        start, end = event["ts"], event["ts"] + event["dur"]
        stack = open_spans[event["tid"]]
        while stack and stack[-1][1] <= start:
            stack.pop()
        assert not stack or (stack[-1][0] <= start and end <= stack[-1][1]), event
        stack.append((start, end))


def rows_of(events: list[dict[str, Any]]) -> dict[str, int]:
    """Row names with their tids."""
    return {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}


def test_the_file_has_every_kind_of_event(tmp_path: Path) -> None:
    trace = Trace(num_iterations=1)
    before = time.time()
    with trace.span("score", num_tokens=7), trace.span("score/actor"):
        trace.instant("prefetch", "main", role="critic")
    start = time.perf_counter()
    trace.add("critic params", "copies/in", start, start + 0.25, bytes=1 << 20, part="params")
    trace.counter("queue", 3)
    events = written(trace, tmp_path, rank=3)
    assert {event["pid"] for event in events} == {3}
    spans = {event["name"]: event for event in of_kind(events, "X")}
    assert set(spans) == {"score", "score/actor", "critic params"}
    assert spans["score"]["args"] == {"num_tokens": 7} and spans["score"]["tid"] == spans["score/actor"]["tid"]
    assert spans["critic params"]["args"] == {"bytes": 1 << 20, "part": "params"}
    assert abs(spans["critic params"]["dur"] - 250_000) <= 1 and abs(spans["score"]["ts"] / 1e6 - before) < 5
    assert [(event["name"], event["args"]) for event in of_kind(events, "C")] == [("queue", {"value": 3.0})]
    (instant,) = of_kind(events, "i")
    assert (instant["name"], instant["tid"], instant["args"]) == ("prefetch", spans["score"]["tid"], {"role": "critic"})
    assert_nested(events)


def test_process_and_rows_have_names_and_a_stable_order(tmp_path: Path) -> None:
    trace = Trace(num_iterations=1)
    for track in ("other", *reversed(TRACKS)):
        trace.add("work", track, 1.0, 2.0)
    events = written(trace, tmp_path, rank=5)
    rows = rows_of(events)
    assert sorted(rows, key=rows.__getitem__) == [*TRACKS, "other"]
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert sorted(order, key=order.__getitem__) == sorted(rows.values())
    process = {event["name"]: event["args"] for event in events if event["name"].startswith("process_")}
    assert process == {"process_name": {"name": "rank 5"}, "process_sort_index": {"sort_index": 5}}
    alone = Trace(num_iterations=1)
    alone.add("work", "rewards", 1.0, 2.0)
    assert rows_of(written(alone, tmp_path, rank=5))["rewards"] == rows["rewards"]


def test_no_two_ranks_share_a_thread_id(tmp_path: Path) -> None:
    trace = Trace(num_iterations=1)
    trace.counter("queue", 1)
    for track in (*TRACKS, "other"):
        trace.add("work", track, 1.0, 2.0)
        trace.add("work", track, 1.5, 2.5)
    ids = [{event["tid"] for event in written(trace, tmp_path, rank)} for rank in range(20)]
    assert all(len(of_rank) == 2 * len(TRACKS) + 2 for of_rank in ids)
    assert len(set().union(*ids, range(20))) == sum(map(len, ids)) + 20  # nor with a process


def test_threads_of_one_track_have_rows_of_their_own(tmp_path: Path) -> None:
    trace = Trace(num_iterations=1)
    barrier = threading.Barrier(3)

    def work() -> None:
        barrier.wait()
        for i in range(50):
            with trace.span("outer", track="rewards", i=i), trace.span("inner", track="rewards"):
                time.sleep(0.0001)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = written(trace, tmp_path)
    assert sorted(rows_of(events)) == ["rewards", "rewards 2", "rewards 3"]
    assert len(of_kind(events, "X")) == 300
    assert_nested(events)


SPANS = st.lists(
    st.builds(
        lambda track, start, length, thread: Span("x", track, start, start + length, thread),
        st.sampled_from(["main", "rewards"]),
        st.floats(0, 1e-4) | st.integers(0, 5),
        st.floats(0, 1e-4) | st.integers(0, 5),
        st.sampled_from([None, 1, 2]),
    ),
    max_size=25,
)


@given(spans=SPANS, offset=st.integers(0, 2 * 10**18))
def test_any_spans_nest_in_the_file(spans: list[Span], offset: int) -> None:
    events = chrome_events(spans, [], [], 0, offset)
    assert len(of_kind(events, "X")) == len(spans)
    assert_nested(events)


def test_only_the_last_iterations_are_kept(tmp_path: Path) -> None:
    trace = Trace(num_iterations=2)
    for i in range(10):
        for _ in range(100):
            trace.add(f"span {i}", "main", float(i), i + 0.5)
        trace.instant(f"instant {i}", "main")
        trace.counter(f"counter {i}", i)
        trace.begin_iteration()
    with trace.span("after"):
        pass
    events = [event for event in written(trace, tmp_path) if event["ph"] != "M"]
    marks, carried = 3, 8 + 9 + 10  # where each iteration begins, and what counters said then
    assert len(events) == 2 * 102 + 1 + marks + carried
    assert {event["name"].split()[-1] for event in events if event["ph"] != "C"} == {"8", "9", "after", "begins"}
    counters = [(event["name"], event["args"]["value"]) for event in of_kind(events, "C")]
    assert counters[:8] == [(f"counter {i}", i) for i in range(8)], "the oldest that is kept says what came before"


def test_no_iterations_keep_nothing_and_write_nothing(tmp_path: Path) -> None:
    trace = Trace(num_iterations=0)
    with trace.span("score"):
        trace.instant("now", "main")
    trace.add("copy", "copies/in", 0.0, 1.0)
    trace.counter("queue", 1)
    trace.write(tmp_path / "trace" / "rank0.json", 0)
    assert trace.iteration_spans() == [] and list(tmp_path.iterdir()) == []


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(num_iterations=1)
    trace.add("first", "main", 0.0, 1.0)
    path = tmp_path / "rank0.json"
    trace.write(path, 0)
    trace.add("second", "main", 1.0, 2.0)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk"):
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
        trace.write(path, 0)
    assert [event["name"] for event in of_kind(json.loads(path.read_text())["traceEvents"], "X")] == ["first"]
    trace.write(path, 0)
    assert len(of_kind(json.loads(path.read_text())["traceEvents"], "X")) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_what_json_cannot_say_is_said_as_text_or_left_out(tmp_path: Path) -> None:
    trace = Trace(num_iterations=1)
    trace.counter("loss", math.nan)
    with trace.span("step", loss=math.inf, path=Path("a/b"), name_of_role="数学", flag=True):
        pass
    events = written(trace, tmp_path)
    assert not of_kind(events, "C")
    assert of_kind(events, "X")[0]["args"] == {"loss": "inf", "path": "a/b", "name_of_role": "数学", "flag": True}


def test_a_failed_block_is_in_the_trace_with_its_error(tmp_path: Path) -> None:
    trace = Trace(num_iterations=1)
    with pytest.raises(KeyError), trace.span("train"), trace.span("train/step", step=4):
        raise KeyError("w")
    args = {event["name"]: event["args"] for event in of_kind(written(trace, tmp_path), "X")}
    assert args == {"train": {"error": "KeyError"}, "train/step": {"step": 4, "error": "KeyError"}}

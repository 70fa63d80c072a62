"""The trace of one rank: what ran, when and where, as a file for ui.perfetto.dev or chrome://tracing. No collective.

A track is a lane with a name. Its spans come from one thread or several; each thread has a row of its own there, so that
spans on a row nest or follow each other, which is what the viewers ask of complete ("X") events. Asynchronous ("b"/"e")
events would need no rows, but viewers draw those apart from the thread, without its nesting and its sums by name.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

#: The known tracks, in the order in which viewers show them; others come below, by name.
TRACKS = ("main", "engine", "copies/out", "copies/in", "text", "rewards", "disk")

#: A span whose name starts so is not work: its thread waits for what another one does.
WAIT = "wait/"

#: Marks on the track main where an iteration begins, or what comes after the last one.
BEGIN = "iteration begins"

_ROWS_PER_TRACK = 1_000
#: More than there are ranks, too: Perfetto finds a thread by its tid alone at times, so that no two ranks may share one.
_TIDS_PER_RANK = 100_000
_NO_ARGS: Mapping[str, object] = MappingProxyType({})


class Span(NamedTuple):
    """Something that ran on `track` from `start` to `end`, in seconds of time.perf_counter().

    thread: the thread that ran it; None where it ran elsewhere, as on a CUDA stream: then the track itself is who ran it.
    """

    name: str
    track: str
    start: float
    end: float
    thread: int | None = None
    args: Mapping[str, object] = _NO_ARGS

    @property
    def is_wait(self) -> bool:
        """Whether it stands for waiting, not for work."""
        return self.name.startswith(WAIT)


class Instant(NamedTuple):
    """A moment worth a mark, in seconds of time.perf_counter()."""

    name: str
    track: str
    time: float
    args: Mapping[str, object]


class Sample(NamedTuple):
    """The value of a counter from `time` on, in seconds of time.perf_counter()."""

    name: str
    time: float
    value: float


@dataclass
class _Iteration:
    spans: list[Span] = field(default_factory=list)
    instants: list[Instant] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class _OpenSpan:
    """A class, not a generator: it costs a third."""

    __slots__ = ("_args", "_name", "_start", "_trace", "_track")

    def __init__(self, trace: Trace, name: str, track: str, args: dict[str, object]) -> None:
        self._trace, self._name, self._track, self._args = trace, name, track, args

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        end = time.perf_counter()
        if kind is not None:
            self._args["error"] = kind.__name__
        self._trace.keep(Span(self._name, self._track, self._start, end, threading.get_ident(), self._args))


class Trace:
    """Keeps what happened on this rank in the present iteration and in the last `num_iterations` before it.

    0 iterations: keeps nothing, writes nothing. Any thread may record; a span costs about 3 us.
    `args` are shown beside the event: numbers and text.
    """

    def __init__(self, num_iterations: int) -> None:
        self.enabled = num_iterations > 0
        self._lock = threading.Lock()
        self._iterations: deque[_Iteration] = deque([_Iteration()], maxlen=num_iterations + 1)
        self._counters: dict[str, float] = {}
        self._unix_minus_perf_ns = time.time_ns() - time.perf_counter_ns()

    def span(self, name: str, track: str = "main", **args: object) -> AbstractContextManager[None]:
        """Records how long the block runs, on a row of the calling thread; where it raises, the error's name goes along."""
        return _OpenSpan(self, name, track, args) if self.enabled else nullcontext()

    def add(self, name: str, track: str, start: float, end: float, **args: object) -> None:
        """Records what was measured elsewhere; `start` and `end` in seconds of time.perf_counter().

        The track itself counts as who ran it (Span.thread), whatever thread calls this.
        """
        self.keep(Span(name, track, start, end, None, args))

    def instant(self, name: str, track: str, **args: object) -> None:
        """Marks this moment."""
        if self.enabled:
            with self._lock:
                self._iterations[-1].instants.append(Instant(name, track, time.perf_counter(), args))

    def counter(self, name: str, value: float) -> None:
        """Sets a counter from this moment on. What is not finite is left out: JSON cannot say it."""
        if self.enabled and math.isfinite(value):
            with self._lock:
                self._counters[name] = float(value)
                self._iterations[-1].samples.append(Sample(name, time.perf_counter(), float(value)))

    def keep(self, span: Span) -> None:
        """Records a span as it is."""
        if self.enabled:
            with self._lock:
                self._iterations[-1].spans.append(span)

    def begin_iteration(self) -> None:
        """What is recorded from now on belongs to the next iteration; the oldest one is forgotten where there are too many.

        Counters stay as they are; the new iteration says so, since the old one may be forgotten.
        """
        now = time.perf_counter()
        with self._lock:
            samples = [Sample(name, now, value) for name, value in self._counters.items()]
            self._iterations.append(_Iteration(instants=[Instant(BEGIN, "main", now, _NO_ARGS)], samples=samples))

    def last(self) -> str:
        """What ended last, and how long ago, for people to read."""
        with self._lock:
            span = next((kept.spans[-1] for kept in reversed(self._iterations) if kept.spans), None)
        if span is None:
            return "nothing" if self.enabled else "not known (trainer.trace_iterations is 0)"
        return f"{span.name} ({span.track}), {time.perf_counter() - span.end:.1f} s ago"

    def iteration_spans(self) -> list[Span]:
        """What ended in the present iteration."""
        with self._lock:
            return list(self._iterations[-1].spans)

    def write(self, path: Path | str, rank: int) -> None:
        """Writes all that is kept as a Chrome trace, in place of what is there; first aside, so that a file is always whole.

        The process is the rank, times are Unix microseconds: files of several ranks can be joined.
        """
        if not self.enabled:
            return
        with self._lock:
            spans = [span for kept in self._iterations for span in kept.spans]
            instants = [instant for kept in self._iterations for instant in kept.instants]
            samples = [sample for kept in self._iterations for sample in kept.samples]
        events = chrome_events(spans, instants, samples, rank, self._unix_minus_perf_ns)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.partial")
        aside.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False), encoding="utf-8")
        os.replace(aside, path)


def chrome_events(
    spans: Iterable[Span], instants: Iterable[Instant], samples: Iterable[Sample], rank: int, unix_minus_perf_ns: int
) -> list[dict[str, Any]]:
    """The events of a Chrome trace: names and order of process and rows first, then what happened, in the order of time.

    Spans on one tid nest or follow each other, to the microsecond.
    """

    def microseconds(seconds: float) -> int:
        # Whole numbers: viewers read doubles, which have no room for more in the 2020s, and rounding would break nesting.
        return (unix_minus_perf_ns + round(seconds * 1e9)) // 1000

    instants = list(instants)
    timed = [(microseconds(span.start), microseconds(span.end), span) for span in spans]
    rows = _rows(timed)
    used = rows.keys() | {(instant.track, 0) for instant in instants}
    tids = _tids(rank, {track for track, _ in used})
    events: list[dict[str, Any]] = []
    for (track, row), members in rows.items():
        tid = tids[track] + row
        for start, end, span in members:
            event = {"name": span.name, "cat": track, "ph": "X", "ts": start, "dur": end - start, "pid": rank, "tid": tid}
            events.append(event | {"args": _shown(span.args)})
    for instant in instants:
        event = {"name": instant.name, "cat": instant.track, "ph": "i", "s": "t", "ts": microseconds(instant.time), "pid": rank}
        events.append(event | {"tid": tids[instant.track], "args": _shown(instant.args)})
    for sample in samples:
        event = {"name": sample.name, "ph": "C", "ts": microseconds(sample.time), "pid": rank, "tid": tids["main"]}
        events.append(event | {"args": {"value": sample.value}})
    # The outer one of two spans that start together comes first: viewers take the order of the file.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return _names(rank, tids["main"], {tids[track] + row: f"{track} {row + 1}" if row else track for track, row in used}) + events


_Timed = tuple[int, int, Span]


def _rows(timed: Iterable[_Timed]) -> dict[tuple[str, int], list[_Timed]]:
    """Spans by (track, row). A row belongs to one thread, and its spans nest or follow each other."""
    rows: dict[tuple[str, int], list[_Timed]] = {}
    #: Of each track: whose a row is, and the ends of the spans that are open there, the outer ones first.
    open_rows: dict[str, list[tuple[int | None, list[int]]]] = {}
    for start, end, span in sorted(timed, key=lambda entry: (entry[0], -entry[1])):
        of_track = open_rows.setdefault(span.track, [])
        for row, (thread, ends) in enumerate(of_track):
            if thread == span.thread and _fits(ends, start, end):
                break
        else:
            row, ends = len(of_track), []
            of_track.append((span.thread, ends))
        ends.append(end)
        rows.setdefault((span.track, row), []).append((start, end, span))
    return rows


def _fits(ends: list[int], start: int, end: int) -> bool:
    """Closes what ended by `start`; whether a span until `end` lies within what is still open."""
    while ends and ends[-1] <= start:
        ends.pop()
    return not ends or end <= ends[-1]


def _tids(rank: int, tracks: Iterable[str]) -> dict[str, int]:
    """The tid of the first row of each track, known ones and `tracks`: never a process id, nor 0, which viewers hide."""
    others = sorted(set(tracks) - set(TRACKS))
    return {track: (rank + 1) * _TIDS_PER_RANK + place * _ROWS_PER_TRACK for place, track in enumerate((*TRACKS, *others))}


def _names(rank: int, main: int, rows: Mapping[int, str]) -> list[dict[str, Any]]:
    """Metadata events: what process and rows are called, by tid, and their order on the screen; `main` is the tid of main."""

    def event(kind: str, tid: int, key: str, value: object) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "ts": 0, "pid": rank, "tid": tid, "args": {key: value}}

    events = [event("process_name", main, "name", f"rank {rank}"), event("process_sort_index", main, "sort_index", rank)]
    for tid, name in sorted(rows.items()):
        events += [event("thread_name", tid, "name", name), event("thread_sort_index", tid, "sort_index", tid)]
    return events


def _shown(args: Mapping[str, object]) -> dict[str, object]:
    """Arguments as JSON can say them: what is neither text nor a finite number becomes text."""
    return {
        name: value if isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)) else str(value)
        for name, value in args.items()
    }

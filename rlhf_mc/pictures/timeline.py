"""Where an iteration went: what ran when on some ranks, and which roles were on the device meanwhile. From the traces of the ranks."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rlhf_mc.offload.parts import ON_DEVICE
from rlhf_mc.offload.text import readable
from rlhf_mc.pictures.theme import COLORS, DARK, FONT_POINTS, GREY, LIGHT, color_of
from rlhf_mc.tracking.trace import BEGIN, TRACKS, WAIT

#: What tracks are called here, where it is not their name.
_TITLES = {
    "main": "stages",
    "engine": "engine's steps",
    "copies/out": "copies to the host",
    "copies/in": "copies to the device",
    "rewards": "reward functions",
}
#: Whose a stage is, where its name does not say it.
_WHOSE = {"generate": "engine", "sync_weights": "engine", "update_heads": "medusa"}
_INCHES = 12.0
_ROW_INCHES = 0.24
_MEMORY_INCHES = 1.7
_MICRO = 1e-6
#: Bars closer than this share of the picture's width are one: nobody sees the gap.
_INVISIBLE = 1 / 2000


class Bar(NamedTuple):
    """Something that ran, in seconds from the start of the picture."""

    start: float
    end: float
    name: str
    color: str


_Event = Mapping[str, Any]


@dataclass(frozen=True)
class RankTrace:
    """One rank's trace of one iteration. start, end: microseconds of the clock.  events: of Chrome's format, as `Trace.write` has them."""

    rank: int
    start: int
    end: int
    events: Sequence[_Event]


class Row(NamedTuple):
    """What ran on one track of a rank in the iteration; not empty."""

    trace: RankTrace
    track: str
    spans: list[_Event]


def read_trace(path: Path, rank: int) -> RankTrace:
    """The last whole iteration in a trace; where there is none, all of it. Raises OSError, and ValueError for what is no trace."""
    try:
        events = json.loads(path.read_bytes())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        begins = [event["ts"] for event in events if event["ph"] == "i" and event["name"] == BEGIN]
        whole = [(start, end) for start, end in zip(begins, begins[1:]) if any(start <= span["ts"] < end for span in spans)]
        start, end = whole[-1] if whole else (min(span["ts"] for span in spans), max(map(_end, spans)))
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: it is no trace of a rank, or an empty one") from None
    return RankTrace(rank, start, end, events)


def timeline(traces: Sequence[RankTrace], title: str) -> Figure:
    """The figure: rows of bars for each rank, and below them the device memory of the first one, if its trace tells it.

    traces: at least one; ranks of one host, whose clocks agree.
    """
    start, end = min(trace.start for trace in traces), max(trace.end for trace in traces)
    seconds = (end - start) * _MICRO
    rows = [Row(trace, track, spans) for trace in traces for track in TRACKS if (spans := _spans_of(trace, track))]
    memory = _memory(traces[0], start)
    heights = [_ROW_INCHES * (len(rows) + len(traces))] + ([_MEMORY_INCHES] if memory else [])
    figure = Figure(figsize=(_INCHES, sum(heights) + 1.1), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    _draw_rows(axes[0], rows, start, seconds)
    if memory:
        _draw_memory(axes[1], memory, seconds, traces[0].rank)
    axes[0].set_xlim(0, seconds)
    axes[-1].set_xlabel("seconds")
    shown = {_whose(span) for row in rows for span in row.spans} | memory.keys()
    used = [role for role in COLORS if role in shown]
    labels = [*used, "no role's", "waits"]
    handles = [Patch(color=color_of(role)) for role in used] + [Patch(color=GREY), Patch(facecolor="white", edgecolor=DARK, hatch="////")]
    figure.legend(handles, [label.replace("_", " ") for label in labels], loc="outside lower center", ncols=len(labels), handlelength=1)
    return figure


def _draw_rows(axes: Axes, rows: Sequence[Row], start: int, seconds: float) -> None:
    """One row for each track of each rank, ranks a gap apart. start, seconds: of the picture."""
    places, labels, place, previous = [], [], 0.0, None
    for trace, track, spans in rows:
        if previous is not None and previous is not trace:
            place += 0.6
        previous = trace
        bars = _merged([_bar(event, start) for event in spans], seconds * _INVISIBLE)
        ranges = [(bar.start, bar.end - bar.start) for bar in bars]
        axes.broken_barh(ranges, (place - 0.4, 0.8), facecolors=[bar.color for bar in bars], linewidth=0)
        if track == "main":
            waits = _merged([_bar(event, start) for event in _waits_of(trace)], seconds * _INVISIBLE)
            ranges = [(bar.start, bar.end - bar.start) for bar in waits]
            axes.broken_barh(ranges, (place - 0.4, 0.8), facecolor="none", edgecolor=DARK, hatch="//////", linewidth=0)
            _write_names(axes, bars, place, seconds)
        places.append(place)
        title = _TITLES.get(track, track)
        labels.append(f"rank {trace.rank}: {title}" if track == "main" else title)
        place += 1
    axes.set_yticks(places, labels)
    axes.set_ylim(place - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=LIGHT, linewidth=0.5)
    axes.set_axisbelow(True)


def _write_names(axes: Axes, bars: Iterable[Bar], place: float, seconds: float) -> None:
    """Into the bars that have room for them."""
    points_a_second = (_INCHES - 1.8) * 72 / seconds
    for bar in bars:
        points = (bar.end - bar.start) * points_a_second
        if name := next((name for name in (bar.name, bar.name.partition(" ")[0]) if len(name) * FONT_POINTS * 0.6 < points), None):
            axes.text((bar.start + bar.end) / 2, place, name, ha="center", va="center", color="white", fontsize=FONT_POINTS)


def _draw_memory(axes: Axes, memory: Mapping[str, tuple[list[float], list[float]]], seconds: float, rank: int) -> None:
    """Areas on top of each other. memory: of each role, moments and bytes from then on."""
    moments = sorted({moment for at, _ in memory.values() for moment in at} | {0.0, seconds})
    values = [[_at(moment, *memory[role]) for moment in moments] for role in memory]
    axes.stackplot(moments, values, colors=[color_of(role) for role in memory], step="post", linewidth=0)
    top = max(map(sum, zip(*values, strict=True)), default=0)
    axes.set_title(f"params, gradients and optimizer states on the device of rank {rank}")
    axes.set_yticks([0, top / 2, top], ["0", readable(round(top / 2)), readable(round(top))])
    axes.grid(axis="both", color=LIGHT, linewidth=0.5)
    axes.set_axisbelow(True)


def _at(moment: float, moments: list[float], values: list[float]) -> float:
    """The last value until then; 0 before the first."""
    place = bisect_right(moments, moment)
    return values[place - 1] if place else 0.0


def _memory(trace: RankTrace, start: int) -> dict[str, tuple[list[float], list[float]]]:
    """Of each role that ever was on the device in this time: seconds from the start, and bytes from then on."""
    found: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for event in trace.events:
        if event["ph"] == "C" and event["name"].startswith(ON_DEVICE) and event["ts"] <= trace.end:
            moments, values = found[event["name"].removeprefix(ON_DEVICE)]
            moments.append(max(event["ts"] - start, 0) * _MICRO)
            values.append(event["args"]["value"])
    return {role: found[role] for role in COLORS if role in found and any(found[role][1])}


def _spans_of(trace: RankTrace, track: str) -> list[_Event]:
    """What ran on a track in the iteration; of stages within stages the innermost ones."""
    spans = [event for event in _within(trace, track) if not event["name"].startswith(WAIT)]
    if track != "main":
        return spans
    followers = [*spans[1:], None]  # in the order of time; of two that start together, the outer one comes first
    return [span for span, following in zip(spans, followers, strict=True) if following is None or _end(following) > _end(span)]


def _waits_of(trace: RankTrace) -> list[_Event]:
    return [event for event in _within(trace, "main") if event["name"].startswith(WAIT)]


def _within(trace: RankTrace, track: str) -> Iterator[_Event]:
    return (event for event in trace.events if event["ph"] == "X" and event["cat"] == track and trace.start <= event["ts"] < trace.end)


def _end(span: _Event) -> int:
    return span["ts"] + span["dur"]


def _bar(event: _Event, start: int) -> Bar:
    begin = (event["ts"] - start) * _MICRO
    name = event["name"].replace("/", " ").replace("_", " ")
    return Bar(begin, begin + event["dur"] * _MICRO, name, color_of(_whose(event)))


def _whose(event: _Event) -> str:
    """The role that a span is about, or the engine; an empty text where it is neither."""
    name, last = event["name"], event["name"].rpartition("/")[2].removeprefix("update_")
    if event["cat"] == "engine":
        return "engine"
    return event["args"].get("role") or _WHOSE.get(name) or (last if last in COLORS else "")


def _merged(bars: Sequence[Bar], gap: float) -> list[Bar]:
    """Bars of one colour and name that touch, or nearly, as one: a rollout has thousands of steps, and a picture 2,000 points."""
    merged: list[Bar] = []
    for bar in sorted(bars):
        last = merged[-1] if merged else None
        if last is not None and (last.name, last.color) == (bar.name, bar.color) and bar.start - last.end <= gap:
            merged[-1] = last._replace(end=max(last.end, bar.end))
        else:
            merged.append(bar)
    return merged

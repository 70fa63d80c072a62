"""What was learned: the metrics of a run over its iterations, a panel for each kind that it has."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlhf_mc.pictures.theme import DARK, OTHERS, color_of
from rlhf_mc.tracking.attempts import lines_of

Rows = Sequence[dict[str, float]]

_COLUMNS = 4
_PANEL_INCHES = (3.1, 2.0)
_HELD_OUT = "val/"


@dataclass(frozen=True)
class Line:
    """metric: its name in metrics.jsonl.  band: two more, between which the ground is tinted."""

    metric: str
    label: str = ""
    color: str = DARK
    band: tuple[str, str] | None = None


@dataclass(frozen=True)
class Panel:
    """Lines over one axis."""

    title: str
    lines: Sequence[Line]
    logarithmic: bool = False


def _heads(title: str, metric: str, count: int, word: str) -> Panel:
    return Panel(title, [Line(metric.format(k), f"{word} {k}", OTHERS[(k - 1) % len(OTHERS)]) for k in range(1, count + 1)])


#: In the order in which they are drawn; those without a metric in the run are left out.
PANELS = [
    Panel("score of the samples", [Line("critic/score/mean", "mean", color_of("reward_model"), ("critic/score/min", "critic/score/max"))]),
    Panel("KL to the reference, nats a token", [
        Line("actor/reward_kl_penalty", "samples", color_of("reference")), Line("actor/kl_loss", "as a loss"),
    ]),
    Panel("entropy of the actor, nats a token", [Line("actor/entropy", "", color_of("actor"))]),
    Panel("share of ratios, values clipped", [
        Line("actor/pg_clipfrac", "actor", color_of("actor")), Line("critic/vf_clipfrac", "critic", color_of("critic")),
    ]),
    Panel("response length, tokens", [
        Line("response_length/mean", "mean", color_of("actor"), ("response_length/min", "response_length/max")),
    ]),
    Panel("what the critic explains of the returns", [Line("critic/vf_explained_var", "", color_of("critic"))]),
    Panel("gradient norm", [
        Line("actor/grad_norm", "actor", color_of("actor")),
        Line("critic/grad_norm", "critic", color_of("critic")),
        Line("medusa/grad_norm", "draft heads", color_of("medusa")),
    ], logarithmic=True),
    _heads("accepted drafts, by position", "medusa/acceptance/position_{}", 8, "position"),
    Panel("log-probs of engine and trainer differ by", [
        Line("training/rollout_logprobs_diff_mean", "mean", color_of("engine")),
        Line("training/rollout_logprobs_diff_max", "most"),
    ], logarithmic=True),
    Panel("loss", [Line("train/loss", "training", color_of("actor")), Line("val/loss", "held out")]),
    Panel("margin of chosen over rejected", [Line("train/margin", "training", color_of("actor")), Line("val/margin", "held out")]),
    Panel("chosen scored above rejected", [Line("train/accuracy", "training", color_of("actor"))]),
    Panel("gradient norm", [Line("train/grad_norm", "", color_of("actor"))], logarithmic=True),
    _heads("draft heads right", "train/medusa/head_{}/accuracy", 8, "head"),
]  # fmt: skip


def read_metrics(path: Path) -> Rows:
    """The lines of metrics.jsonl by iteration, without what was not finite; of two with the same number the later one holds."""
    rows = {line["iteration"]: line for line in lines_of(path)}
    return [{name: value for name, value in rows[iteration].items() if value is not None} for iteration in sorted(rows)]


def read_before(path: Path) -> dict[str, float]:
    """What was measured on held-out prompts before the first iteration, from summary.json; nothing where a run has not ended yet."""
    try:
        rows = json.loads(path.read_bytes())["rows"]
    except (OSError, ValueError, KeyError):
        return {}
    return {f"{_HELD_OUT}{row['label']}": row["before"] for row in rows if row["before"] is not None}


def learning(rows: Rows, before: Mapping[str, float], title: str) -> Figure:
    """The figure of all panels for which these rows have something. before: see `read_before`."""
    names = {name for row in rows for name in row}
    drawers = [*_held_out(names, before), *(_drawer(panel) for panel in PANELS if any(line.metric in names for line in panel.lines))]
    if any(name.startswith("timing_s/") for name in names):
        drawers.append(_seconds)
    rows_of_panels = math.ceil(len(drawers) / _COLUMNS)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * _COLUMNS, height * rows_of_panels + 0.4), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    for place, draw in enumerate(drawers):
        axes = figure.add_subplot(rows_of_panels, _COLUMNS, place + 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.tick_params(length=2)
        draw(axes, rows)
    return figure


_Drawer = Callable[[Axes, Rows], None]


def _held_out(names: set[str], before: Mapping[str, float]) -> Iterator[_Drawer]:
    """A panel for each thing that was measured on held-out prompts, for their scales differ; over the iterations that were done."""
    shown_elsewhere = {line.metric for panel in PANELS for line in panel.lines}

    def drawer(name: str) -> _Drawer:
        def draw(axes: Axes, rows: Rows) -> None:
            axes.set_title(f"held out: {name.removeprefix(_HELD_OUT)}", fontweight="bold")
            iterations, values = _points(rows, name)
            points = ([(0.0, before[name])] if name in before else []) + [(at + 1, value) for at, value in zip(iterations, values)]
            axes.plot(*zip(*points, strict=True), color=DARK, marker="o", markersize=3, linewidth=1.4)

        return draw

    yield from (drawer(name) for name in sorted(names) if name.startswith(_HELD_OUT) and name not in shown_elsewhere)


def _drawer(panel: Panel) -> _Drawer:
    def draw(axes: Axes, rows: Rows) -> None:
        axes.set_title(panel.title)
        for line in panel.lines:
            iterations, values = _points(rows, line.metric)
            if not values:
                continue
            marker = "o" if len(values) * 3 < len(rows) else None
            axes.plot(iterations, values, color=line.color, label=line.label or None, linewidth=1.4, marker=marker, markersize=3)
            if line.band is not None:
                (at, low), (_, high) = (_points(rows, name) for name in line.band)
                if at and len(low) == len(high):
                    axes.fill_between(at, low, high, color=line.color, alpha=0.15, linewidth=0)
        if panel.logarithmic and min(axes.dataLim.ymin, axes.dataLim.minposy) > 0:
            axes.set_yscale("log")
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(loc="best", handlelength=1.2, borderpad=0.1, labelspacing=0.2)

    return draw


def _points(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """Iterations, and the values there; where there is none, nothing."""
    found = [(row["iteration"], row[name]) for row in rows if name in row]
    return [iteration for iteration, _ in found], [value for _, value in found]


#: Stages of the outer loop, which do not lie within each other: prefix of the metric, label, colour.
_STAGES = [
    ("generate", "generate", color_of("engine")),
    ("score", "score", color_of("reward_model")),
    ("update_critic", "critic", color_of("critic")),
    ("update_actor", "actor", color_of("actor")),
    ("update_heads", "heads", color_of("medusa")),
    ("update", "update", color_of("actor")),
    ("sync_weights", "sync", color_of("reference")),
    ("evaluate", "evaluate", "#bbbbbb"),
]


def _seconds(axes: Axes, rows: Rows) -> None:
    """How long an iteration took, by stage, one on the other; above them is what no stage covers."""
    axes.set_title("seconds of an iteration")
    edges = [row["iteration"] - 0.5 for row in rows] + [rows[-1]["iteration"] + 0.5]
    under = [0.0] * len(rows)
    for stage, label, color in _STAGES:
        values = [row.get(f"timing_s/{stage}", 0.0) for row in rows]
        if any(values):
            top = [below + value for below, value in zip(under, values, strict=True)]
            axes.stairs(top, edges, baseline=under, fill=True, color=color, label=label, linewidth=0)
            under = top
    whole = [row.get("timing_s/step", math.nan) for row in rows]
    axes.stairs(whole, edges, baseline=None, color=DARK, linewidth=0.8, label="all")
    axes.set_ylim(0, 1.6 * max((value for value in (*whole, *under) if math.isfinite(value)), default=1.0))  # room for the legend
    axes.legend(loc="upper right", ncols=3, handlelength=0.8, columnspacing=0.8, borderpad=0.1, labelspacing=0.2)

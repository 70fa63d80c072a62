"""Text for a terminal: numbers, aligned tables, the line of an iteration. Pure functions of their arguments."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

HEADER_EVERY_LINES = 20
MIN_COLUMN_WIDTH = 8


@dataclass(frozen=True)
class SampleRow:
    """One sample for people to read. `parts`: each scorer's own number by name."""

    prompt: str
    response: str
    score: float
    parts: Mapping[str, float] = field(default_factory=dict)
    finish_reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """One line of the table at the end of a run; None where the number was not measured."""

    label: str
    before: float | None
    after: float | None

    @property
    def change(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True)
class _Column:
    """`metric` names one metric, or with a `*` every metric of that shape; then `header` is a format of the matched part."""

    header: str
    metric: str


SUMMARY_COLUMNS = (
    _Column("score", "critic/score/mean"),
    _Column("{}", "reward/*/mean"),
    _Column("{}", "val/*"),
    _Column("kl", "actor/reward_kl_penalty"),
    _Column("length", "response_length/mean"),
    _Column("loss", "train/loss"),
    _Column("accuracy", "train/accuracy"),
    _Column("pg_loss", "actor/pg_loss"),
    _Column("vf_loss", "critic/vf_loss"),
    _Column("tok/fwd", "medusa/tokens_per_forward"),
    _Column("speedup", "medusa/speedup_estimate"),
    _Column("tok/s/dev", "perf/throughput"),
    _Column("{}_s", "timing_s/*"),
    _Column("host_gib", "perf/host_rss_peak_gib"),
    _Column("dev_gib", "perf/max_memory_allocated_gb"),
)


class SummaryTable:
    """Turns the metrics of iterations into aligned lines under a header that comes back now and then.

    A column appears with the first iteration that has its metric, and stays; a changed set of columns repeats the header.
    """

    def __init__(self) -> None:
        self._shown: list[dict[str, str]] = [{} for _ in SUMMARY_COLUMNS]
        self._header = ""
        self._lines_since_header = 0

    def lines(self, iteration: int, metrics: Mapping[str, float]) -> list[str]:
        """The line of this iteration, with the header before it where one is due."""
        for column, shown in zip(SUMMARY_COLUMNS, self._shown, strict=True):
            shown |= {name: header for name in metrics if (header := _match(column, name)) is not None}
        headers = {name: header for shown in self._shown for name, header in shown.items()}
        widths = [max(len(header), MIN_COLUMN_WIDTH) for header in headers.values()]
        header = " ".join(["  iter", *(h.rjust(w) for h, w in zip(headers.values(), widths, strict=True))])
        cells = [format_number(metrics.get(name)).rjust(w) for name, w in zip(headers, widths, strict=True)]
        line = " ".join([f"{iteration:6d}", *cells])
        self._lines_since_header += 1
        if header == self._header and self._lines_since_header <= HEADER_EVERY_LINES:
            return [line]
        self._header, self._lines_since_header = header, 1
        return [header, line]


def _match(column: _Column, name: str) -> str | None:
    """Header of metric `name` under `column`, None if it does not belong there. A `*` does not match a slash."""
    prefix, star, suffix = column.metric.partition("*")
    if not star:
        return column.header if name == column.metric else None
    middle = name[len(prefix) : len(name) - len(suffix)]
    if not (name.startswith(prefix) and name.endswith(suffix)) or not middle or "/" in middle:
        return None
    return column.header.format(middle)


def format_number(value: float | None) -> str:
    """At most 8 characters for |value| < 1e6, four significant digits; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.1e}"
    decimals = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3 if size >= 1 else 4
    return f"{value:.{decimals}f}"


def escape(text: str) -> str:
    """One printable line: newlines, tabs and control characters as escapes, so that a sample cannot drive the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def display_width(text: str) -> int:
    """Terminal columns of printable text: East Asian wide characters take two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def shorten(text: str, width: int, keep: Literal["start", "end"] = "start") -> str:
    """`text` if it fits into `width` columns, else its start (or end) with three dots."""
    if display_width(text) <= width:
        return text
    kept, used = [], 3
    for c in text if keep == "start" else reversed(text):
        used += display_width(c)
        if used > width:
            break
        kept.append(c)
    return "".join(kept) + "..." if keep == "start" else "..." + "".join(reversed(kept))


def aligned_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """A table with a rule under the header; columns in `left` are aligned to the left, the others to the right."""
    table = [list(header), *map(list, rows)]
    widths = [max(map(display_width, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        gaps = [" " * (w - display_width(cell)) for cell, w in zip(row, widths, strict=True)]
        cells = [cell + gap if i in left else gap + cell for i, (cell, gap) in enumerate(zip(row, gaps, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]])


def sample_table(rows: Sequence[SampleRow], prompt_width: int = 40, response_width: int = 60) -> str:
    """The end of each prompt, the start of its response, score, parts and finish reason, one line a sample."""
    parts = part_names(rows)
    cells = [
        [
            shorten(escape(row.prompt), prompt_width, keep="end"),
            shorten(escape(row.response), response_width),
            *(format_number(number) for number in (row.score, *(row.parts.get(name) for name in parts))),
            escape(row.finish_reason),
        ]
        for row in rows
    ]
    return aligned_table(["prompt", "response", "score", *parts, "finish"], cells, left=[0, 1])


def part_names(rows: Sequence[SampleRow]) -> list[str]:
    """Names of the parts of all rows, each once, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.parts))


def comparison_table(title: str, rows: Sequence[Comparison]) -> str:
    """The title, then label, before, after and signed change of each row."""
    cells = [[row.label, format_number(row.before), format_number(row.after), _signed(row.change)] for row in rows]
    return f"{title}\n" + aligned_table(["", "before", "after", "change"], cells, left=[0])


def _signed(value: float | None) -> str:
    return ("+" if value is not None and value > 0 else "") + format_number(value)

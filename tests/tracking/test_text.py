"""Numbers, tables and lines for the terminal."""

from __future__ import annotations

import math

import pytest

from rlhf_mc.tracking import Comparison, SampleRow
from rlhf_mc.tracking.text import (
    HEADER_EVERY_LINES,
    SummaryTable,
    aligned_table,
    comparison_table,
    display_width,
    escape,
    format_number,
    sample_table,
    shorten,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (3, "3"), (0.0, "0.0000"), (1.25, "1.250"), (-12.5, "-12.50"), (123.45, "123.5"), (4321.9, "4322"),
     (-1.5e-5, "-1.5e-05"), (2.5e7, "2.5e+07"), (math.nan, "nan"), (-math.inf, "-inf")],
)  # fmt: skip
def test_format_number(value: float | None, text: str) -> None:
    assert format_number(value) == text and len(text) <= 8


def test_summary_lines_are_aligned_and_repeat_the_header() -> None:
    table = SummaryTable()
    metrics = {
        "critic/score/mean": 0.5, "reward/exact/mean": 0.25, "reward/exact/odd/mean": 9.0, "actor/reward_kl_penalty": -1.5e-5,
        "timing_s/generate": 1.5, "timing_s/score": 2.0, "timing_s/score/actor": 9.0, "perf/host_rss_peak_gib": 12.25,
    }  # fmt: skip
    printed = [line for i in range(HEADER_EVERY_LINES + 1) for line in table.lines(i, metrics)]
    headers = [i for i, line in enumerate(printed) if "score_s" in line]
    assert headers == [0, HEADER_EVERY_LINES + 1]
    assert printed[0].split() == ["iter", "score", "exact", "kl", "generate_s", "score_s", "host_gib"]
    assert printed[1].split() == ["0", "0.5000", "0.2500", "-1.5e-05", "1.500", "2.000", "12.25"]
    assert len({len(line) for line in printed}) == 1


def test_summary_keeps_a_column_whose_metric_is_missing_once() -> None:
    table = SummaryTable()
    assert len(table.lines(1, {"critic/score/mean": 1.0})) == 2
    header, line = table.lines(2, {"critic/score/mean": 1.0, "val/exact": 0.5})
    assert header.split() == ["iter", "score", "exact"] and line.split() == ["2", "1.000", "0.5000"]
    (line,) = table.lines(3, {"critic/score/mean": 1.0})
    assert line.split() == ["3", "1.000", "-"]


def test_samples_cannot_drive_the_terminal() -> None:
    assert escape("a\nb\t\x1b[2Jc\u202e") == "a\\nb\\t\\x1b[2Jc\\u202e"
    shown = sample_table([SampleRow("p", "\x1b]0;title\x07\r\n", 1.0)])
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_shorten_counts_wide_characters() -> None:
    assert shorten("数学题目答案", 8) == "数学..." and display_width(shorten("数学题目答案", 8)) <= 8
    assert shorten("数学题目答案", 8, keep="end") == "...答案"
    assert shorten("abcdef", 6) == "abcdef"


def test_tables_are_aligned() -> None:
    lines = aligned_table(["name", "x"], [["数学", "1"], ["a", "10"]], left=[0]).splitlines()
    assert lines == ["name   x", "--------", "数学   1", "a     10"]
    with pytest.raises(ValueError):
        aligned_table(["name", "x"], [["only one cell"]], left=[0])
    assert comparison_table("t", [Comparison("a", 1.0, 1.0)]).splitlines()[-1].split() == ["a", "1.000", "1.000", "0.0000"]

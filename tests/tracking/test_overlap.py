"""Time hidden and its bound: by hand, and what must hold for any spans."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mc.tracking import Overlap, Span, overlap_of
from rlhf_mc.tracking.overlap import difference, union


def main(name: str, start: float, end: float) -> Span:
    return Span(name, "main", start, end, thread=1)


def copy(direction: str, start: float, end: float) -> Span:
    return Span("copy", f"copies/{direction}", start, end)


def reward(worker: int, start: float, end: float) -> Span:
    return Span("call", "rewards", start, end, thread=100 + worker)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        pytest.param([], Overlap(0, 0, 0, 0, 0), id="nothing"),
        pytest.param([main("score", 0, 4), copy("in", 1, 3)], Overlap(6, 4, 2, 4, 0), id="a copy beside work is hidden"),
        pytest.param([main("score", 0, 2), copy("in", 2, 5)], Overlap(5, 5, 0, 3, 0), id="a copy after it is not, but could be"),
        pytest.param(
            [main("score", 0, 5), main("wait/copies", 0, 3), copy("in", 0, 3)], Overlap(5, 5, 0, 3, 0), id="waiting for it hides nothing"
        ),
        pytest.param([copy("in", 0, 3), copy("out", 1, 4)], Overlap(6, 4, 2, 3, 0), id="both directions at once"),
        pytest.param([main("score", 0, 9), main("score/actor", 1, 5)], Overlap(9, 9, 0, 9, 0), id="nested stages are the same seconds"),
        pytest.param([main("score", 0, 1), main("train", 3, 4)], Overlap(2, 2, 0, 2, 2), id="idle counts nowhere"),
        pytest.param([main("wait/rewards", 0, 2)], Overlap(0, 0, 0, 0, 2), id="only waiting"),
        pytest.param(
            [main("generate", 0, 4), Span("step", "engine", 1, 3, thread=1)], Overlap(4, 4, 0, 4, 0), id="one thread on two tracks"
        ),
        pytest.param(
            [main("score", 0, 4), Span("step", "engine", 1, 3, thread=2)], Overlap(6, 4, 2, 4, 0), id="two threads"
        ),
        pytest.param(
            [reward(0, 0, 1), reward(0, 1, 2), reward(0, 2, 4), reward(1, 0, 1)], Overlap(5, 4, 1, 2.5, 0), id="workers could share evenly"
        ),
        pytest.param([reward(0, 0, 6), reward(1, 0, 1)], Overlap(7, 6, 1, 6, 0), id="but not cut the longest call"),
    ],
)  # fmt: skip
def test_by_hand(spans: list[Span], expected: Overlap) -> None:
    assert overlap_of(spans) == expected


def test_ratios_and_metrics() -> None:
    overlap = overlap_of([main("score", 0, 4), copy("in", 1, 3), copy("in", 4, 6)])
    assert overlap == Overlap(serial=8, elapsed=6, hidden=2, bound=4, idle=0)
    assert (overlap.hidden_ratio, overlap.hideable_ratio, overlap.bound_ratio) == (0.25, 0.5, pytest.approx(2 / 3))
    assert overlap.metrics() == {
        "pipeline/serial_seconds": 8, "pipeline/elapsed_seconds": 6, "pipeline/hidden_seconds": 2, "pipeline/bound_seconds": 4,
        "pipeline/idle_seconds": 0,
    }  # fmt: skip
    nothing = overlap_of([])
    assert (nothing.hidden_ratio, nothing.hideable_ratio, nothing.bound_ratio) == (0.0, 0.0, 1.0)


def test_intervals() -> None:
    assert union([(3, 4), (0, 2), (1, 3), (5, 5)]) == [(0, 3), (3, 4)]
    assert difference([(0, 10), (12, 14)], [(1, 2), (4, 5), (9, 13)]) == [(0, 1), (2, 4), (5, 9), (13, 14)]
    assert difference([(0, 1)], [(0, 1)]) == [] and difference([(0, 1)], []) == [(0, 1)]


TIMES = st.floats(0, 1e6) | st.integers(0, 20).map(float)
SPANS = st.lists(
    st.builds(
        lambda name, track, thread, a, b: Span(name, track, min(a, b), max(a, b), thread),
        st.sampled_from(["score", "wait/copies"]),
        st.sampled_from(["main", "engine", "copies/in", "copies/out", "rewards"]),
        st.sampled_from([None, 1, 2, 3]),
        TIMES,
        TIMES,
    ),
    max_size=20,
)


@given(spans=SPANS, seed=st.integers(0, 9))
def test_what_holds_for_any_spans(spans: list[Span], seed: int) -> None:
    overlap = overlap_of(spans)
    assert 0 <= overlap.bound <= overlap.elapsed <= overlap.serial
    assert overlap.hidden >= 0 and overlap.idle >= 0
    assert overlap.hidden_ratio <= overlap.hideable_ratio + 1e-9
    shuffled = random.Random(seed).sample(spans, len(spans))
    assert overlap_of(shuffled) == overlap


@given(spans=SPANS)
def test_the_window_is_work_and_idle_time(spans: list[Span]) -> None:
    overlap = overlap_of(spans)
    window = max((span.end for span in spans), default=0.0) - min((span.start for span in spans), default=0.0)
    assert overlap.elapsed + overlap.idle == pytest.approx(window, abs=1e-6)


@given(spans=SPANS)
def test_work_that_never_runs_at_once_hides_nothing(spans: list[Span]) -> None:
    apart = [span._replace(start=2 * i, end=2 * i + 1) for i, span in enumerate(spans)]
    assert overlap_of(apart).hidden == 0

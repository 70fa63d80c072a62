"""Copy lanes: what they copy, and what they tell the trace of it."""

from __future__ import annotations

import time

import pytest
import torch

from rlhf_mc.offload.lanes import lanes
from rlhf_mc.tracking import Trace

LABELS = {"role": "critic", "part": "params"}
NUM_BYTES = 1 << 20

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("trace", [None, Trace(num_iterations=0)], ids=["no trace", "switched off"])
def test_without_a_trace_copies_run_all_the_same(device: str, trace: Trace | None) -> None:
    there, here = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=device), torch.ones(NUM_BYTES, dtype=torch.uint8)
    _, back = lanes(torch.device(device), trace)
    assert back.copy(there, here, LABELS).finish() > 0
    assert there.sum() == NUM_BYTES
    back.zero(there, LABELS).finish()
    assert there.sum() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_is_in_the_trace_when_it_ran(device: str) -> None:
    trace = Trace(num_iterations=1)
    there, here = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=device), torch.ones(NUM_BYTES, dtype=torch.uint8)
    out, back = lanes(torch.device(device), trace)
    before = time.perf_counter()
    seconds = [back.copy(there, here, LABELS).finish(), out.copy(here, there, LABELS).finish(), back.zero(there, LABELS).finish()]
    after = time.perf_counter()
    spans = [span for span in trace.iteration_spans() if not span.is_wait]
    assert [(span.name, span.track) for span in spans] == [
        ("copy critic params", "copies/in"),
        ("copy critic params", "copies/out"),
        ("zero critic params", "copies/in"),
    ]
    slack = 0.0 if device == "cpu" else 1e-4  # between the clocks of host and device
    assert [span.end - span.start for span in spans] == pytest.approx(seconds, abs=slack)
    assert all(span.args == LABELS | {"bytes": NUM_BYTES} and span.thread is None for span in spans)
    ends = [before, *(moment for span in spans for moment in (span.start, span.end)), after]
    assert all(first <= second + slack for first, second in zip(ends, ends[1:]))


def test_who_waits_for_a_copy_is_in_the_trace() -> None:
    trace = Trace(num_iterations=1)
    _, back = lanes(torch.device("cpu"), trace)
    block = torch.zeros(64 << 20, dtype=torch.uint8)
    copied = [back.zero(block, LABELS) for _ in range(4)]
    copied[-1].before_compute()
    copied[-1].finish()  # no wait any more
    waits = [span for span in trace.iteration_spans() if span.is_wait]
    assert [(span.name, span.track, span.args) for span in waits] == [("wait/copies", "main", LABELS)]

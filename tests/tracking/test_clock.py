"""The clock: nesting, iterations, whose peak of memory it was, and the spans of stages."""

from __future__ import annotations

import mmap
import threading
import time

import pytest
import torch

from rlhf_mc.tracking import StageClock, Trace
from rlhf_mc.tracking.clock import HostMemory


def test_clock_adds_up_repeated_and_nested_stages() -> None:
    clock = StageClock()
    with clock.stage("score"):
        for _ in range(2):
            with clock.stage("score/actor"):
                time.sleep(0.02)
        time.sleep(0.01)
    metrics = clock.metrics(total_num_tokens=1000, num_devices=2)
    assert metrics["timing_s/score/actor"] >= 0.04
    assert metrics["timing_s/score"] >= metrics["timing_s/score/actor"] + 0.01
    assert metrics["timing_s/step"] >= metrics["timing_s/score"]
    assert metrics["perf/throughput"] == pytest.approx(1000 / (2 * metrics["perf/time_per_step"]))
    assert metrics["perf/total_num_tokens"] == 1000


def test_clock_starts_each_iteration_anew() -> None:
    clock = StageClock()
    with clock.stage("generate"):
        time.sleep(0.03)
    first = clock.metrics()
    second = clock.metrics()
    assert first["timing_s/step"] >= first["timing_s/generate"] >= 0.03
    assert second["timing_s/step"] < first["timing_s/step"]
    assert "timing_s/generate" not in second and "perf/throughput" not in second


def test_clock_counts_a_stage_that_raises() -> None:
    clock = StageClock()
    with pytest.raises(RuntimeError), clock.stage("train"):
        raise RuntimeError
    assert "timing_s/train" in clock.metrics()


@pytest.mark.skipif(not HostMemory().can_reset, reason="this system does not let a process lower its memory mark")
def test_host_peak_belongs_to_the_stage_that_had_it() -> None:
    """128 MiB live and die before the inner stage: they are in the outer stage's peak and the iteration's only."""
    clock = StageClock()
    with clock.stage("outer"):
        block = mmap.mmap(-1, 128 << 20)  # not from the heap: that may keep what is freed
        for _ in range(128):
            block.write(bytes(1 << 20))
        block.close()
        with clock.stage("outer/inner"):
            pass
    metrics = clock.metrics()
    assert metrics["perf/host_rss_peak_gib"] >= metrics["perf/host_rss_gib"] + 0.11
    assert metrics["memory_gib/outer/host"] >= metrics["memory_gib/outer/inner/host"] + 0.11
    assert clock.metrics()["perf/host_rss_peak_gib"] < metrics["perf/host_rss_peak_gib"] - 0.11


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_peak_belongs_to_the_stage_that_had_it() -> None:
    clock = StageClock(torch.device("cuda"))
    with clock.stage("outer"):
        block = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        del block
        with clock.stage("outer/inner"):
            pass
    metrics = clock.metrics()
    assert metrics["memory_gib/outer/device"] >= metrics["memory_gib/outer/inner/device"] + 0.125
    assert metrics["perf/max_memory_allocated_gb"] >= 0.125


def test_stages_are_spans_of_the_track_main_and_iterations_are_the_clocks() -> None:
    trace = Trace(num_iterations=1)
    trace.add("before", "main", 0.0, 1.0)
    clock = StageClock(trace=trace)
    with clock.stage("score"), clock.stage("score/actor"):
        thread = threading.Thread(target=_run_stage, args=(clock, "reward"))
        thread.start()
        thread.join()
    spans = {span.name: span for span in trace.iteration_spans()}
    assert set(spans) == {"score", "score/actor", "reward"} and {span.track for span in spans.values()} == {"main"}
    assert spans["reward"].thread != spans["score"].thread == spans["score/actor"].thread
    assert spans["score"].start <= spans["score/actor"].start <= spans["score/actor"].end <= spans["score"].end
    assert clock.metrics()["timing_s/score"] <= spans["score"].end - spans["score"].start
    assert trace.iteration_spans() == []


def _run_stage(clock: StageClock, name: str) -> None:
    with clock.stage(name):
        time.sleep(0.002)

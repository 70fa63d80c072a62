"""The pool: what reaches a reward function, and what becomes of functions that fail, hang, die, or are misnamed."""

import datetime
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from math import isnan
from pathlib import Path

import numpy as np
import pytest

from rlhf_mc.config import ConfigError, RewardFunction
from rlhf_mc.rewards.confinement import Confinement
from rlhf_mc.rewards.interface import RewardError, RewardSample
from rlhf_mc.rewards.pool import RewardPool
from rlhf_mc.rewards.process import Outcome
from rlhf_mc.tracking import Trace

FILE = Path(__file__).parent / "functions_for_tests.py"


def function(name: str, **settings) -> RewardFunction:
    return RewardFunction(path=f"{FILE}:{name}", **settings)


def sample(response: str = "ok", row: dict | None = None, response_ids: list[int] | None = None) -> RewardSample:
    return RewardSample("prompt", response, [1], [7, 8, 9] if response_ids is None else response_ids, row or {})


def scored(responses: list[str], name: str = "obey", **settings):
    """Results of one function of the test file on these responses, any number of failures allowed."""
    settings = {"timeout_seconds": 5.0, "max_error_rate": 1.0} | settings
    with RewardPool([function(name)], **settings) as pool:
        return pool.score([sample(response) for response in responses]).functions[0]


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone_within(seconds: float, pids: list[int]) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def workers_of(pid: int) -> list[int]:
    return [child for child in children_of(pid) if b"rlhf_mc.rewards.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_a_sample_arrives_as_it_was_sent():
    row = {"nested": {"deep": [1, None]}, "array": np.array([1, 2]), "date": datetime.date(2026, 1, 31)}
    sent = RewardSample("2 + 2 = é\ud800", "4", [5, 6], [7], row, truncated=True)
    with RewardPool([function("seen")]) as pool:
        assert pool.score([sent]).functions[0].values == [1.0]


def test_values_keep_the_order_of_the_samples_over_several_workers():
    responses = ["x" * n for n in (5, 0, 3, 1, 4, 2, 6)]
    assert scored(responses, "length", num_workers=3).values == [5, 0, 3, 1, 4, 2, 6]


def test_a_row_that_json_cannot_carry_is_named():
    with RewardPool([function("length")]) as pool, pytest.raises(RewardError, match=r"type bytes .*'image': 'bytes'"):
        pool.score([sample(row={"image": b"\x00"})])


@pytest.mark.parametrize("stuck", ["spin", "hold the gil"])
def test_a_time_out_hits_only_its_sample(stuck):
    started = time.monotonic()
    result = scored(["ok", stuck, "ok", "ok"], timeout_seconds=1.0)
    assert time.monotonic() - started < 10
    assert result.outcomes == [Outcome.SCORED, Outcome.TIMEOUT, Outcome.SCORED, Outcome.SCORED]
    assert isnan(result.values[1]) and [result.values[i] for i in (0, 2, 3)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("bad", ["raise", "exit", "die", "segfault", "nan", "none"])
def test_a_failure_hits_only_its_sample(bad):
    result = scored(["ok", bad, "ok"])
    assert result.outcomes == [Outcome.SCORED, Outcome.ERROR, Outcome.SCORED]
    assert isnan(result.values[1]) and result.rate(Outcome.ERROR) == pytest.approx(1 / 3)


def test_a_time_out_also_ends_what_the_function_started():
    with RewardPool([function("obey")], timeout_seconds=1.0, max_error_rate=1.0) as pool:
        pending = pool.submit([sample("leave a child")])
        deadline = time.monotonic() + 5
        while not (grandchildren := [g for c in workers_of(os.getpid()) for g in children_of(c)]) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert grandchildren
        assert pool.collect([pending]).functions[0].outcomes == [Outcome.TIMEOUT]
        assert gone_within(3, grandchildren)


def test_each_fault_is_shown_once_with_its_traceback(caplog):
    with RewardPool([function("obey")], max_error_rate=1.0) as pool, caplog.at_level(logging.ERROR):
        first = pool.score([sample("raise"), sample("raise"), sample("die")])
        again = pool.score([sample("raise"), sample("die")])
    assert first.functions[0].rate(Outcome.ERROR) == again.functions[0].rate(Outcome.ERROR) == 1.0
    assert caplog.text.count("cannot score 'raise'") == 1 and caplog.text.count("in obey") == 1
    assert caplog.text.count("the worker process ended with exit code 3") == 1
    assert len(caplog.records) == 2


def test_a_rate_above_the_limit_stops_and_at_the_limit_does_not():
    samples = [sample("raise")] + [sample("ok")] * 3
    with RewardPool([function("obey")], max_error_rate=0.25) as pool:
        assert pool.score(samples).metrics()["reward/obey/error_rate"] == 0.25
        with pytest.raises(RewardError, match=r"(?s)obey.*2 of 4 samples.*50\.0%.*25\.0%.*ValueError: cannot score 'raise'"):
            pool.score([sample("raise")] * 2 + [sample("ok")] * 2)


def test_the_rate_counts_over_all_that_is_collected_together():
    with RewardPool([function("obey")], max_error_rate=0.25) as pool:
        parts = [pool.submit([sample("raise"), sample("ok")]), pool.submit([sample("ok"), sample("ok")])]
        results = pool.collect(parts)
        assert results.functions[0].outcomes == [Outcome.ERROR] + [Outcome.SCORED] * 3
        assert len(results.data_sources) == 4


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("/no/such/file.py:f", "there is no file /no/such/file.py"),
        (f"{FILE}:absent", "has no function 'absent'"),
        (f"{FILE}:not_a_function", "not_a_function' in .* is of type int, not a function"),
    ],
)
def test_a_function_that_cannot_be_had_is_refused_at_start(path, message):
    started = time.monotonic()
    with pytest.raises(ConfigError, match=message):
        RewardPool([function("length"), RewardFunction(path=path)], num_workers=2)
    assert time.monotonic() - started < 5
    assert workers_of(os.getpid()) == []


def test_an_error_while_importing_shows_its_traceback(tmp_path):
    (tmp_path / "broken.py").write_text("def f(sample):\n    return 1\n\nimport absent_package\n")
    with pytest.raises(ConfigError, match=r"(?s)reward\.functions: .*broken\.py.*line 4.*No module named 'absent_package'"):
        RewardPool([RewardFunction(path=f"{tmp_path}/broken.py:f")])


def test_a_worker_that_dies_while_importing_is_reported(tmp_path):
    (tmp_path / "dies.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(ConfigError, match="ended with exit code 7 while it imported"):
        RewardPool([RewardFunction(path=f"{tmp_path}/dies.py:f")])


def test_arguments_reach_the_function_and_unknown_ones_are_refused_at_start():
    with RewardPool([function("obey", arguments={"spin_on": "never"})], timeout_seconds=5.0) as pool:
        assert pool.score([sample("spin")]).functions[0].values == [1.0]
    with pytest.raises(ConfigError, match=r"obey\(sample, spin_on='spin'\) cannot be called.*'spin_no'"):
        RewardPool([function("obey", arguments={"spin_no": "never"})])


def test_the_data_source_chooses_the_function():
    functions = [function("length", data_source="a"), function("per_token", data_source="b"), function("slow")]
    with RewardPool(functions, num_workers=2) as pool:
        results = pool.score([sample("four", {"data_source": source}) for source in ("a", "b")] + [sample("four")])
    length, per_token, slow = results.functions
    assert length.outcomes == [Outcome.SCORED, Outcome.NOT_APPLICABLE, Outcome.NOT_APPLICABLE]
    assert length.values[0] == 4.0 and isnan(length.values[1]) and isnan(length.values[2])
    assert per_token.token_values == [None, [7.0, 8.0, 9.0], None] and per_token.values[1] == 24.0
    assert slow.values == [1.0, 1.0, 1.0]
    assert results.metrics() == {
        **{f"reward/{name}/{rate}": 0.0 for name in ("length", "per_token", "slow") for rate in ("error_rate", "timeout_rate")},
        "reward/length/mean": 4.0,
        "reward/per_token/mean": 24.0,
        "reward/slow/mean": 1.0,
    }
    assert results.data_sources == ["a", "b", None]


def test_rewards_a_token_must_be_one_a_token(caplog):
    result = scored(["ok"], "one_too_many")
    assert result.outcomes == [Outcome.ERROR] and result.token_values == [None]
    assert "returned 4 rewards for 3 response tokens" in caplog.text


def test_an_empty_response_may_have_an_empty_list():
    with RewardPool([function("per_token")]) as pool:
        result = pool.score([sample("", response_ids=[])]).functions[0]
    assert result.token_values == [[]] and result.values == [0.0]


def test_printing_goes_to_standard_error_and_harms_nothing(capfd):
    assert scored(["ok", "ok"], "chatty").values == [2.0, 2.0]
    output = capfd.readouterr()
    for word in ("printed", "written", "echoed"):
        assert f"{word} by the reward function" in output.err and word not in output.out


def test_a_worker_imports_nothing_heavy():
    assert scored(["ok"], "imports").values == [0.0]


def test_submit_does_not_wait():
    with RewardPool([function("slow")], num_workers=2) as pool:
        started = time.monotonic()
        pending = pool.submit([sample()] * 4)
        assert time.monotonic() - started < 0.1 and not pending.done()
        assert pool.collect([pending]).functions[0].values == [1.0] * 4
        assert pending.done() and time.monotonic() - started >= 0.4


def test_every_call_is_in_the_trace_with_its_time_in_the_queue():
    trace = Trace(num_iterations=1)
    with RewardPool([function("slow")], num_workers=2, trace=trace) as pool:
        pool.score([sample()] * 4)
    spans = trace.iteration_spans()
    assert {(span.name, span.track) for span in spans} == {("slow", "rewards")} and len(spans) == 4
    assert all(span.end - span.start >= 0.2 for span in spans)
    assert len({span.thread for span in spans}) == 2
    queued = sorted(span.args["queued_ms"] for span in spans)
    assert queued[1] < 100 and queued[2] >= 200  # two at once, two after them


def test_close_ends_workers_at_once_and_refuses_more():
    pool = RewardPool([function("obey")], num_workers=2, timeout_seconds=60)
    workers = workers_of(os.getpid())
    pending = pool.submit([sample("spin")] * 5)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 5 and len(workers) == 2 and gone_within(1, workers)
    with pytest.raises(RewardError, match="closed"):
        pool.collect([pending])
    with pytest.raises(RewardError, match="closed"):
        pool.submit([sample()])


def test_no_functions_need_no_processes():
    with RewardPool([], num_workers=4) as pool:
        assert workers_of(os.getpid()) == []
        results = pool.score([sample()])
    assert results.functions == [] and results.metrics() == {}


PARENT = """
import sys, time
from rlhf_mc.config import RewardFunction
from rlhf_mc.rewards.interface import RewardSample
from rlhf_mc.rewards.pool import RewardPool

functions = [RewardFunction(path=f"{sys.argv[1]}:{name}") for name in ("obey", "process_id")]
pool = RewardPool(functions, num_workers=2, timeout_seconds=60)
ids = {pool.score([RewardSample("p", "ok", [], [], {})]).functions[1].values[0] for _ in range(20)}
pending = pool.submit([RewardSample("p", "spin", [], [], {}), RewardSample("p", "hold the gil", [], [], {})])
time.sleep(0.5)
print(*(int(i) for i in ids), flush=True)
if sys.argv[2] == "wait":
    time.sleep(60)
"""


@pytest.mark.parametrize("end", ["kill", "leave"])
def test_workers_do_not_outlive_their_parent(end):
    """Killed with SIGKILL, or ended without close() while workers are busy."""
    command = [sys.executable, "-c", PARENT, str(FILE), "wait" if end == "kill" else "leave"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert workers
    if end == "kill":
        assert all(alive(pid) for pid in workers)
        workers = workers_of(parent.pid)
        assert len(workers) == 2
        parent.send_signal(signal.SIGKILL)
    parent.wait(timeout=10)
    assert gone_within(3, workers)


def test_a_function_that_takes_more_memory_than_allowed_is_a_failed_call(caplog):
    """The limit is the worker's own: the next sample is scored."""
    result = scored(["take 8 GiB", "ok"], confinement=Confinement(memory_bytes=2 << 30))
    assert result.outcomes == [Outcome.ERROR, Outcome.SCORED]
    assert "MemoryError" in caplog.text


def test_a_worker_without_network_reaches_nobody(caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        asks = sample("connect", {"port": server.getsockname()[1]})
        outcomes = []
        for network in (True, False):
            try:
                pool = RewardPool([function("obey")], max_error_rate=1.0, confinement=Confinement(network=network))
            except ConfigError as error:
                assert not network and "set reward.network=true" in str(error)
                pytest.skip("this host lets no process leave the network")
            with pool:
                outcomes += pool.score([asks]).functions[0].outcomes
    assert outcomes == [Outcome.SCORED, Outcome.ERROR]
    assert "unreachable" in caplog.text

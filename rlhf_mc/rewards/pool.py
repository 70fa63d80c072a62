"""Scores samples with the reward functions of a recipe, in worker processes that can be killed.

Knows nothing of ranks: whoever holds samples makes a pool and scores them. Mixing with the reward model is in `mix.py`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import isnan, nan
from types import TracebackType
from typing import TYPE_CHECKING

from rlhf_mc.config import ConfigError, RewardFunction
from rlhf_mc.rewards.confinement import Confinement
from rlhf_mc.rewards.interface import RewardError, RewardSample
from rlhf_mc.rewards.process import Call, Outcome, WorkerProcess

if TYPE_CHECKING:
    from rlhf_mc.tracking import Trace

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FunctionResult:
    """What one reward function said of B samples.

    values: B floats; the sum where the function scores tokens; NaN where there is no number, and `outcomes` says why.
    token_values: B entries, the list of one float a response token where the function scored tokens, else None.
    """

    function: RewardFunction
    values: list[float]
    token_values: list[list[float] | None]
    outcomes: list[Outcome]

    def rate(self, *outcomes: Outcome) -> float:
        """Share of the calls made that ended so; 0 where no call was made."""
        num_calls = len(self.outcomes) - self.outcomes.count(Outcome.NOT_APPLICABLE)
        return sum(self.outcomes.count(outcome) for outcome in outcomes) / max(num_calls, 1)


@dataclass(frozen=True)
class RewardResults:
    """What every reward function said of B samples. data_sources: the rows' `data_source`, None where they have none."""

    functions: list[FunctionResult]
    data_sources: list[str | None]

    def metrics(self) -> dict[str, float]:
        """reward/<label>/mean over the scored samples (absent where there are none), /error_rate and /timeout_rate."""
        metrics = {}
        for result in self.functions:
            key = f"reward/{result.function.label}"
            scored = [value for value in result.values if not isnan(value)]
            if scored:
                metrics[f"{key}/mean"] = sum(scored) / len(scored)
            metrics[f"{key}/error_rate"] = result.rate(Outcome.ERROR)
            metrics[f"{key}/timeout_rate"] = result.rate(Outcome.TIMEOUT)
        return metrics


@dataclass(frozen=True)
class PendingRewards:
    """Samples that are being scored. calls[f][b]: function f on sample b, None where it does not apply."""

    samples: list[RewardSample]
    calls: list[list[Future[Call] | None]]

    def done(self) -> bool:
        """Whether `RewardPool.collect` would return without waiting."""
        return all(call is None or call.done() for calls in self.calls for call in calls)

    def seconds(self) -> float:
        """What all calls took together, once they are done."""
        return sum(call.result().seconds for calls in self.calls for call in calls if call is not None)


@dataclass(frozen=True)
class _Task:
    function: int
    sample: RewardSample
    call: Future[Call]
    submitted: float


class RewardPool:
    """Worker processes that run reward functions, one sample a call, each killed when a call takes too long.

    One thread serves each process. Scoring goes on while the caller does something else between `submit` and `collect`.
    """

    def __init__(
        self,
        functions: list[RewardFunction],
        num_workers: int = 1,
        timeout_seconds: float = 10.0,
        max_error_rate: float = 0.1,
        trace: Trace | None = None,
        confinement: Confinement = Confinement(),
    ) -> None:
        """Imports every function in every worker; ConfigError, with the traceback, where one cannot be used.

        trace: gets each call, on the track rewards, a row for each worker.  confinement: of every worker.
        """
        self.functions = functions
        self.max_error_rate = max_error_rate
        self._trace = trace
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._shown_faults: set[tuple[str, str]] = set()
        self._closed = False
        self._workers = [WorkerProcess(functions, timeout_seconds, confinement) for _ in range(num_workers if functions else 0)]
        starts: list[Future[None]] = [Future() for _ in self._workers]
        # Daemon threads: a program that forgets close() must not wait at its end for samples that nobody will collect.
        self._threads = [
            threading.Thread(target=self._serve, args=pair, name=f"reward-{i}", daemon=True)
            for i, pair in enumerate(zip(self._workers, starts))
        ]
        for thread in self._threads:
            thread.start()
        try:
            for start in starts:
                start.result()
        except RewardError as error:
            self.close()
            raise ConfigError(f"reward.functions: {error}") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def score(self, samples: list[RewardSample]) -> RewardResults:
        """`submit` and `collect` at once."""
        return self.collect([self.submit(samples)])

    def submit(self, samples: list[RewardSample]) -> PendingRewards:
        """Hands samples to the workers and returns at once."""
        if self._closed:
            raise RewardError("the reward pool is closed")
        calls: list[list[Future[Call] | None]] = [[None] * len(samples) for _ in self.functions]
        for b, sample in enumerate(samples):
            for f, function in enumerate(self.functions):
                if function.data_source in (None, sample.row.get("data_source")):
                    calls[f][b] = Future()
                    self._tasks.put(_Task(f, sample, calls[f][b], time.perf_counter()))
        return PendingRewards(samples, calls)

    def collect(self, pending: list[PendingRewards]) -> RewardResults:
        """Waits for the results of all `pending`, joined in the order of the list.

        RewardError where a function failed on more than `max_error_rate` of its calls, over the whole list.
        """
        results = []
        for f, function in enumerate(self.functions):
            calls = [None if call is None else call.result() for part in pending for call in part.calls[f]]
            results.append(_result_of(function, calls))
            self._show_new_faults(function, calls)
            self._check_error_rate(results[-1], calls)
        return RewardResults(results, [sample.row.get("data_source") for part in pending for sample in part.samples])

    def close(self) -> None:
        """Kills the workers, in the middle of a call if need be. What was submitted and not collected is lost."""
        self._closed = True
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                break
            if task is not None:
                task.call.set_exception(RewardError("the reward pool was closed before this sample was scored"))
        for worker in self._workers:
            self._tasks.put(None)
            worker.kill()
        for thread in self._threads:
            thread.join()

    def _serve(self, worker: WorkerProcess, start: Future[None]) -> None:
        """One worker's thread. It also starts the process, since the kernel's PR_SET_PDEATHSIG, which ends a worker
        with its parent, goes by the thread that started it."""
        try:
            worker.start()
            start.set_result(None)
        except BaseException as error:
            start.set_exception(error)
        while (task := self._tasks.get()) is not None:
            try:
                start = time.perf_counter()
                with self._span(task):
                    call = worker.call(task.function, task.sample)
                task.call.set_result(replace(call, seconds=time.perf_counter() - start))
            except BaseException as error:
                task.call.set_exception(error)
        worker.close()

    def _span(self, task: _Task) -> AbstractContextManager[None]:
        """The call alone is work; how long the sample was in the queue before stands beside it."""
        if self._trace is None:
            return nullcontext()
        queued_ms = (time.perf_counter() - task.submitted) * 1000
        return self._trace.span(self.functions[task.function].label, track="rewards", queued_ms=queued_ms)

    def _show_new_faults(self, function: RewardFunction, calls: list[Call | None]) -> None:
        for call in calls:
            if call is not None and call.fault and (function.label, call.fault) not in self._shown_faults:
                self._shown_faults.add((function.label, call.fault))
                message = "reward function '%s' failed on a sample (shown once, counted from now on):\n%s"
                _log.error(message, function.label, call.report)

    def _check_error_rate(self, result: FunctionResult, calls: list[Call | None]) -> None:
        rate = result.rate(Outcome.ERROR, Outcome.TIMEOUT)
        if rate <= self.max_error_rate:
            return
        num_errors, num_timeouts = result.outcomes.count(Outcome.ERROR), result.outcomes.count(Outcome.TIMEOUT)
        num_calls = len(calls) - calls.count(None)
        first = next(call.report for call in calls if call is not None and call.fault)
        raise RewardError(
            f"reward function '{result.function.label}' failed on {num_errors + num_timeouts} of {num_calls} samples "
            f"({num_errors} errors, {num_timeouts} time-outs): {rate:.1%} is above reward.max_error_rate = "
            f"{self.max_error_rate:.1%}. Correct the function, or raise the rate. The first failure:\n{first}"
        )


def _result_of(function: RewardFunction, calls: list[Call | None]) -> FunctionResult:
    values: list[float] = []
    token_values: list[list[float] | None] = []
    for call in calls:
        reward = None if call is None else call.reward
        per_token = isinstance(reward, list)
        token_values.append(reward if per_token else None)
        values.append(nan if reward is None else sum(reward) if per_token else reward)
    outcomes = [Outcome.NOT_APPLICABLE if call is None else call.outcome for call in calls]
    return FunctionResult(function, values, token_values, outcomes)

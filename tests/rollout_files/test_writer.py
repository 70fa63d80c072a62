"""The background writer: beside the caller, one job at a time, and no error lost."""

from __future__ import annotations

import threading

import pytest

from rlhf_mc.rollout_files import BackgroundWriter


def fail() -> None:
    raise OSError("no space")


def test_the_job_runs_beside_the_caller():
    begun, may_end = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        assert may_end.wait(10)

    with BackgroundWriter() as writer:
        writer.submit(job)
        assert begun.wait(10)
        may_end.set()
        assert writer.wait() is None
        assert writer.wait() is None


def test_an_error_waits_for_the_caller_and_comes_once():
    with BackgroundWriter() as writer:
        writer.submit(fail)
        assert str(writer.wait()) == "no space"
        assert writer.wait() is None


def test_a_second_job_may_not_hide_the_error_of_the_first():
    with BackgroundWriter() as writer:
        writer.submit(fail)
        with pytest.raises(RuntimeError, match="not waited for"):
            writer.submit(fail)
        writer.wait()


def test_an_error_that_nobody_asked_for_is_raised_at_the_end():
    with pytest.raises(OSError, match="no space"), BackgroundWriter() as writer:
        writer.submit(fail)


def test_an_error_beside_another_is_noted_on_it():
    with pytest.raises(ValueError, match="other") as caught, BackgroundWriter() as writer:
        writer.submit(fail)
        raise ValueError("other")
    assert caught.value.__notes__ == ["the last job in the background failed too: no space"]

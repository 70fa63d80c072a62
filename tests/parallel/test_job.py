"""A rank's side of the job, and what vLLM reads about it in the environment. No process group."""

from __future__ import annotations

import sys

import pytest

from rlhf_mc.parallel.job import Job


def job_of(rank: int, size: int, per_host: int, engines: int) -> Job:
    environment = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % per_host, "LOCAL_WORLD_SIZE": per_host}
    return Job.of({name: str(value) for name, value in environment.items()}, engines)


@pytest.mark.parametrize(
    ("rank", "engine", "environment"),
    [
        (0, False, ("0", "5", "0", "4")),
        (4, False, ("4", "5", "0", "1")),  # alone on the second host with three engines
        (5, True, ("0", "3", "1", "3")),
        (7, True, ("2", "3", "3", "3")),
    ],
)
def test_each_side_is_a_world_to_itself(rank, engine, environment):
    job = job_of(rank, size=8, per_host=4, engines=3)
    assert job.has_engine_only == engine
    assert tuple(job.environment()[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")) == environment


def test_without_engines_the_environment_stays_as_torchrun_made_it():
    assert job_of(5, size=8, per_host=4, engines=0).environment() == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    }  # fmt: skip


def test_without_torchrun_the_job_is_one_rank():
    assert Job.of({}) == Job(rank=0, size=1, local_rank=0, local_size=1, num_trainers=1)


def test_gloo_leaves_the_host_only_where_a_rank_is_elsewhere():
    assert job_of(1, size=4, per_host=4, engines=1).interface() == ("lo" if sys.platform == "linux" else "lo0")
    assert job_of(1, size=8, per_host=4, engines=0).interface() is None

"""What the start of PPO says to wrong settings, up to the point where the ranks would join; runs in a worker of tests/ranks.py."""

from __future__ import annotations

from typing import NoReturn

import rlhf_mc.stages.start as start
from rlhf_mc.config import ConfigError, Settings
from rlhf_mc.parallel.job import Job
from rlhf_mc.parallel.world import World
from rlhf_mc.recipe import check_files, load_settings


def _too_late(settings: Settings, job: Job) -> NoReturn:
    raise AssertionError("the ranks join, and nothing was refused")


def refusals(world: World, cases: dict[str, list[str]]) -> dict[str, str]:
    """The message of the ConfigError that each command line ends in, as on 2 ranks, before any process group exists."""
    join_job, start.join_job = start.join_job, _too_late
    try:
        return {name: _refusal(arguments) for name, arguments in cases.items()}
    finally:
        start.join_job = join_job


def _refusal(arguments: list[str]) -> str:
    try:
        settings, _ = load_settings(arguments, "train")
        settings.check("train", 2)
        check_files(settings, "train")
        with start.start_ppo(settings, Job.of({"WORLD_SIZE": "2"})):
            return "it started"
    except ConfigError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}, no ConfigError: {error}"

"""Draft heads alone, on samples of a model that stays as it is: what one short run leaves."""

from __future__ import annotations

import json

import pytest
from end_to_end.job import start
from end_to_end.task import Task, written

from rlhf_mc.config import Medusa
from rlhf_mc.medusa.files import check_heads, load_heads
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.hf_config import read_shape

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def settings_of(task: Task) -> dict[str, str]:
    """Without a reward model, and with a learning rate that shows in two rollouts of a random model."""
    settings = task.overrides(task.directory / "out") | {
        "trainer.iterations": "2", "medusa.enabled": "true", "medusa.num_heads": "2", "medusa.steps": "8", "medusa.optim.lr": "1e-2",
        "medusa.drafted_tokens": "2",
    }  # fmt: skip
    return {key: value for key, value in settings.items() if key not in ("reward_model.path", "data.validation")}


def test_heads_learn_from_samples_and_are_saved(task):
    settings = settings_of(task)
    job = start(task.directory / "log", "rlhf_mc.stages.heads", written(settings), ranks=1)
    assert job.wait(200) == 0, job.output
    output = task.directory / "out"
    first, second = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert second["medusa/loss"] < first["medusa/loss"]
    for line in (first, second):
        assert 0 < line["training/rollout_logprobs_diff_max"] < 1e-5 and line["sync/probe_difference"] < 1e-5
        assert line["perf/throughput"] > 0 and line["timing_s/update_heads"] > 0 and line["response_length/mean"] > 0
        assert line["medusa/drafted_tokens"] > 0 and 0 <= line["medusa/acceptance/position_1"] <= 1
    model = read_shape(settings["actor.path"], "actor.path")
    medusa = Medusa(enabled=True, num_heads=2)
    check_heads(output / "medusa", medusa, model)
    assert all(weight.any() for weight in load_heads(output / "medusa", HeadsShape.of(medusa, model)).values())
    assert not {"actor", "critic", "rollouts"} & {path.name for path in output.iterdir()}
    assert "Heads on the first and the last rollout" in job.output and f"the actor stays as it is in {settings['actor.path']}" in job.output
    assert job.processes() == [] and job.left_in_shared_memory() == []

"""An update from files is refused where its settings are not those that the experience was made under."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollout_files.experiences import written

from rlhf_mc.config import ConfigError, Settings
from rlhf_mc.recipe import load_settings
from rlhf_mc.rollout_files import check_replay, conditions

MADE_WITH = ["data.prompts_per_iteration=2", "rollout.temperature=0.7", "algorithm.kl.target=6"]


def settings_of(directory: Path, *overrides: str) -> Settings:
    of_update = ["trainer.mode=update", f"rollout.replay_dir={directory}", "trainer.iterations=2"]
    return load_settings([*MADE_WITH, *of_update, *overrides])[0]


@pytest.fixture
def rollouts(tmp_path) -> Path:
    """The files of two iterations, made under MADE_WITH."""
    made_with = conditions(load_settings(MADE_WITH)[0])
    for iteration in (0, 1):
        written(tmp_path / f"00000{iteration}.jsonl", iteration=iteration, settings=made_with)
    return tmp_path


def refused(settings: Settings) -> str:
    with pytest.raises(ConfigError) as caught:
        check_replay(settings)
    return str(caught.value)


def test_the_same_settings_pass_and_free_ones_may_differ(rollouts):
    check_replay(settings_of(rollouts))
    check_replay(settings_of(rollouts, "actor.optim.lr=1", "algorithm.epochs=2", "actor.clip_ratio_low=0.1", "reward.truncated=mask"))


@pytest.mark.parametrize(
    "override, made_with",
    [
        ("rollout.samples_per_prompt=2", "1"), ("data.prompts_per_iteration=4", "2"), ("rollout.temperature=1.0", "0.7"),
        ("rollout.min_tokens=3", "0"), ("algorithm.lam=0.9", "0.95"), ("algorithm.kl.use=none", '"reward"'),
        ("algorithm.kl.target=null", "6.0"), ("algorithm.whiten_advantages=false", "true"),
    ],
)  # fmt: skip
def test_another_condition_is_refused_with_key_values_and_fix(rollouts, override, made_with):
    message = refused(settings_of(rollouts, override))
    key = override.partition("=")[0]
    assert message.startswith(f"{key}: ") and f"{rollouts}/000000.jsonl was made with {made_with}; set {key}={made_with}" in message


def test_every_file_is_looked_at(rollouts):
    (rollouts / "000001.jsonl").write_bytes((rollouts / "000000.jsonl").read_bytes())
    assert "000001.jsonl holds iteration 0, not 1" in refused(settings_of(rollouts))
    (rollouts / "000001.jsonl").write_text("")
    assert refused(settings_of(rollouts)).startswith(f"{rollouts}/000001.jsonl:1: the line is damaged")


def test_a_count_that_does_not_fit_the_settings(rollouts):
    written(rollouts / "000000.jsonl", num_samples=3, settings=conditions(settings_of(rollouts)))
    assert "says that it holds 3 samples" in refused(settings_of(rollouts)) and "is 2" in refused(settings_of(rollouts))

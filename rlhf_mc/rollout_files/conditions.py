"""The settings that an experience was made under and an update from its file must share; others are not read again, or free."""

from __future__ import annotations

import json
from typing import Any

from rlhf_mc.config import ConfigError, Settings
from rlhf_mc.rollout_files.files import read_header
from rlhf_mc.rollout_files.lines import Header

#: The sampling distribution scales the trainer's log-probs; the rest is in the numbers of the file already.
_KEYS = (
    "data.prompts_per_iteration", "rollout.samples_per_prompt", "rollout.temperature", "rollout.min_tokens",
    "algorithm.advantages", "algorithm.gamma", "algorithm.lam", "algorithm.whiten_advantages",
    "algorithm.kl.use", "algorithm.kl.coef", "algorithm.kl.target", "algorithm.kl.horizon",
)  # fmt: skip


def conditions(settings: Settings) -> dict[str, Any]:
    """Key -> value of each such setting."""
    return {key: _value(settings, key) for key in _KEYS}


def check_replay(settings: Settings) -> None:
    """Raises ConfigError where a file that trainer.mode=update will read is of another iteration or other conditions.

    Reads the headers only. Alike on every rank; no collective.
    """
    for iteration in range(settings.trainer.iterations):
        path = settings.replay_file(iteration)
        header = read_header(path)
        if header.iteration != iteration:
            raise ConfigError(f"rollout.replay_dir: {path} holds iteration {header.iteration}, not {iteration}; undo the renaming")
        _check_conditions(settings, header, str(path))


def _check_conditions(settings: Settings, header: Header, path: str) -> None:
    for key, value in conditions(settings).items():
        made_with = header.settings.get(key)
        if value != made_with:
            raise ConfigError(
                f"{key}: {json.dumps(value)}, but {path} was made with {json.dumps(made_with)}; "
                f"set {key}={json.dumps(made_with)}, or make new rollouts"
            )
    if header.num_samples != settings.num_sequences:
        raise ConfigError(
            f"rollout.replay_dir: {path} says that it holds {header.num_samples} samples, but data.prompts_per_iteration x "
            f"rollout.samples_per_prompt, with which it was made, is {settings.num_sequences}; the file was changed"
        )


def _value(settings: Settings, key: str) -> Any:
    value: Any = settings
    for name in key.split("."):
        value = getattr(value, name)
    return value

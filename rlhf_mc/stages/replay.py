"""Replay: the experience of an iteration comes from the file that another run dumped."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from rlhf_mc.batch import Experience
from rlhf_mc.config import ConfigError
from rlhf_mc.rollout_files import Header, read_rollout
from rlhf_mc.stages.start import Run


def replay(run: Run, iteration: int) -> Experience:
    """Collective over all ranks. Rank 0 reads; every rank gets the same Experience, and the KL coefficient of its update.

    Where the file is damaged or of another model, every rank raises ConfigError.
    """
    with run.clock.stage("replay"):
        found: list[tuple[Header, Experience] | str] = [""]
        if run.world.rank == 0:
            found = [_read(run, iteration)]
        if run.world.size > 1:
            dist.broadcast_object_list(found, src=0, group=run.world.everyone)
    if isinstance(found[0], str):
        raise ConfigError(found[0])
    header, experience = found[0]
    run.kl = replace(run.kl, coef=header.kl_coef)
    return experience


def _read(run: Run, iteration: int) -> tuple[Header, Experience] | str:
    """The file's content, or what is wrong with it."""
    path = run.settings.replay_file(iteration)
    try:
        header, experience = read_rollout(path)
    except ConfigError as error:
        return str(error)
    rollout, vocab = experience.rollout, run.actor.shape.vocab
    largest = int(rollout.tokens.max())
    if largest >= vocab:
        return f"{path}: the token id {largest} is outside the vocabulary of actor.path ({vocab} tokens); name the model that sampled"
    settings = run.settings
    for key, limit, lengths in (
        ("data.max_prompt_tokens", settings.data.max_prompt_tokens, rollout.prompt_lengths),
        ("rollout.max_tokens", settings.rollout.max_tokens, rollout.response_lengths),
    ):
        longest = int(lengths.max())
        if longest > limit:
            return f"{key}: {limit}, but a sample of {path} has {longest} tokens; set {key}={longest} or more"
    return header, experience

"""What must agree between the sections of a Settings: one sentence for each disagreement, with the keys and the fix.

Pure functions from settings to messages, called by `Settings.check`. What one section can see by itself is checked in
config.py; what needs a file is checked by `recipe.check_files` and `models/hf_config.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_mc.config import MicroBatch, Program, Settings


def contradictions(settings: Settings, program: Program, data_parallel: int | None) -> Iterator[str]:
    """All disagreements that matter to `program`; without a data-parallel size, those that do not depend on it."""
    if program == "train":
        yield from _mode(settings)
        yield from _models(settings)
        yield from _medusa(settings)
        if settings.trainer.generates:
            yield from _payment(settings)
            yield from _groups(settings)
            yield from _prompts(settings)
            yield from _rollout_grid(settings)
        yield from _ptx(settings)
        yield from _best(settings)
        yield from _mini_batch(settings)
        yield from _sequence_length(settings)
    elif program == "heads":
        yield from _heads_alone(settings)
        yield from _heads_in_responses(settings)
        yield from _prompts(settings)
        yield from _rollout_grid(settings)
        yield from _sequence_length(settings)
    else:
        yield from _supervised(settings, program)
    if data_parallel is not None:
        yield from _idle_ranks(settings, program, data_parallel)


def _mode(settings: Settings) -> Iterator[str]:
    mode, replay_dir = settings.trainer.mode, settings.rollout.replay_dir
    if mode == "heads":
        yield "trainer.mode: heads, but this program is for PPO; start rlhf_mc.stages.heads, or set trainer.mode=ppo"
    if mode == "rollout" and settings.trainer.export_every:
        yield (
            f"trainer.export_every: {settings.trainer.export_every}, but trainer.mode: rollout trains nothing that could be exported; "
            "set trainer.export_every=0, or trainer.mode=ppo"
        )
    if mode == "update" and replay_dir is None:
        yield (
            "rollout.replay_dir: null, but trainer.mode: update trains on rollouts of another run; "
            "name the directory `rollouts` that a run with rollout.dump=true wrote"
        )
    if mode == "update" and settings.rollout.dump:
        yield "rollout.dump: true, but trainer.mode: update makes no rollouts that it could write; set rollout.dump=false"
    if mode != "update" and replay_dir is not None:
        yield (
            f"rollout.replay_dir: {replay_dir} would never be read under trainer.mode: {mode}; "
            "set trainer.mode=update, or rollout.replay_dir=null"
        )
    if mode == "update" and settings.rollout.placement == "separate":
        yield (
            f"rollout.placement: separate, but trainer.mode: update generates nothing, and rollout.engine_ranks: "
            f"{settings.rollout.engine_ranks} would idle; set rollout.placement=colocated and rollout.engine_ranks=0, and "
            "start as many ranks fewer"
        )


def _models(settings: Settings) -> Iterator[str]:
    if not settings.actor.path:
        yield "actor.path: null; name the Hugging Face directory of the policy"
    if not settings.has_critic and settings.critic.path:
        yield (
            f"critic.path: {settings.critic.path}, but algorithm.advantages: {settings.algorithm.advantages} has no critic; "
            "set critic.path=null, or algorithm.advantages=gae"
        )
    if settings.has_critic and not settings.critic.path and not settings.reward_model.path:
        yield (
            "critic.path: null, and reward_model.path, where the critic would start from, is null too; "
            "name a directory for one of them (the actor's will do for critic.path)"
        )


def _medusa(settings: Settings) -> Iterator[str]:
    if not settings.medusa.enabled:
        return
    if settings.trainer.mode == "update":
        yield (
            "medusa.enabled: true, but trainer.mode: update neither drafts nor makes the hidden states that heads learn from; "
            "set medusa.enabled=false"
        )
    yield from _heads_in_responses(settings)


def _heads_alone(settings: Settings) -> Iterator[str]:
    """What the program that trains draft heads alone cannot do, or would pass over in silence."""
    if settings.trainer.mode != "heads":
        yield f"trainer.mode: {settings.trainer.mode}, but this program trains draft heads alone; leave it out, or start rlhf_mc.train"
    if not settings.actor.path:
        yield "actor.path: null; name the Hugging Face directory of the model that the draft heads are for"
    if not settings.medusa.enabled:
        yield "medusa.enabled: false, but this program trains draft heads and nothing else; set medusa.enabled=true"
    if not settings.medusa.train:
        yield "medusa.train: false leaves the draft heads as they are, and this program trains nothing else; set medusa.train=true"
    if settings.trainer.export_every:
        yield (
            f"trainer.export_every: {settings.trainer.export_every}, but this program writes the draft heads at its end only; "
            "set trainer.export_every=0"
        )
    if settings.rollout.dump:
        yield "rollout.dump: true, but draft heads are trained without rewards, and make no experience to write; set rollout.dump=false"


def _heads_in_responses(settings: Settings) -> Iterator[str]:
    medusa, max_tokens = settings.medusa, settings.rollout.max_tokens
    if medusa.num_heads >= max_tokens:
        yield (
            f"medusa.num_heads: {medusa.num_heads}, but a response has rollout.max_tokens: {max_tokens}, of which the first is never "
            f"drafted; set it to {max(1, max_tokens - 1)} or less"
        )


def _groups(settings: Settings) -> Iterator[str]:
    samples = settings.rollout.samples_per_prompt
    if not settings.has_critic and samples < 2:
        yield (
            f"rollout.samples_per_prompt: {samples}, but algorithm.advantages: {settings.algorithm.advantages} compares the samples of a "
            "prompt with each other; set it to 2 or more"
        )


def _payment(settings: Settings) -> Iterator[str]:
    model, functions = settings.reward_model, settings.reward.functions
    if not (model.path and model.weight) and not any(function.weight for function in functions):
        yield (
            f"reward_model.path: {model.path or 'null'} (weight {model.weight}) and reward.functions: "
            f"{[f'{function.label} (weight {function.weight})' for function in functions]} pay nothing; "
            "name a reward model or a reward function, with a weight other than 0"
        )


def _prompts(settings: Settings) -> Iterator[str]:
    if not settings.data.train:
        yield "data.train: []; name the files that hold the prompts"


def _ptx(settings: Settings) -> Iterator[str]:
    data, ptx_coef = settings.data, settings.actor.ptx_coef
    if ptx_coef > 0 and not data.ptx:
        yield f"data.ptx: [], but actor.ptx_coef: {ptx_coef} needs text; name files in data.ptx, or set actor.ptx_coef=0"
    if data.ptx and ptx_coef == 0:
        yield f"actor.ptx_coef: 0, so that data.ptx: {data.ptx} would never be read; raise actor.ptx_coef, or set data.ptx=[]"


def _best(settings: Settings) -> Iterator[str]:
    trainer, validation = settings.trainer, settings.data.validation
    if not trainer.keep_best:
        return
    if not trainer.save_every:
        yield f"trainer.keep_best: {trainer.keep_best}, but trainer.save_every: 0 makes no checkpoints; set it, or trainer.keep_best=0"
        return
    if not trainer.best_by.removeprefix("-").startswith("val/"):
        return
    if not (trainer.evaluates and validation and trainer.evaluate_every):
        yield (
            f"trainer.best_by: {trainer.best_by}, but nothing is measured on held-out prompts during training (data.validation: {validation}, "
            f"trainer.evaluate_every: {trainer.evaluate_every}); set both, or name another metric"
        )
    elif trainer.save_every % trainer.evaluate_every:
        yield (
            f"trainer.save_every: {trainer.save_every} is no multiple of trainer.evaluate_every: {trainer.evaluate_every}, so that some "
            f"checkpoints would have no {trainer.best_by}, and could not be among the trainer.keep_best"
        )


def _rollout_grid(settings: Settings) -> Iterator[str]:
    """Each replica of a colocated engine lies inside one model-parallel group, so it divides the number of ranks as well."""
    parallel, replica = settings.parallel, settings.rollout.tensor_parallel
    model = parallel.tensor * parallel.pipeline
    if settings.rollout.placement == "colocated" and model % replica:
        yield (
            f"rollout.tensor_parallel: {replica} does not divide parallel.tensor {parallel.tensor} x parallel.pipeline "
            f"{parallel.pipeline} = {model}; the nearest that does is {_nearest_divisor(model, replica)}"
        )


def _mini_batch(settings: Settings) -> Iterator[str]:
    prompts, samples = settings.data.prompts_per_iteration, settings.rollout.samples_per_prompt
    total, size = prompts * samples, settings.algorithm.mini_batch_sequences
    if size is not None and total % size:
        yield (
            f"algorithm.mini_batch_sequences: {size} does not divide data.prompts_per_iteration {prompts} x "
            f"rollout.samples_per_prompt {samples} = {total}; the nearest that does is {_nearest_divisor(total, size)}"
        )


def _sequence_length(settings: Settings) -> Iterator[str]:
    prompt, response = settings.data.max_prompt_tokens, settings.rollout.max_tokens
    for key, micro_batch in _micro_batches(settings):
        if micro_batch.tokens is not None and micro_batch.tokens < prompt + response:
            yield (
                f"{key}.tokens: {micro_batch.tokens} cannot hold a sequence of data.max_prompt_tokens {prompt} + "
                f"rollout.max_tokens {response}; set it to {prompt + response} or more"
            )


def _micro_batches(settings: Settings) -> Iterator[tuple[str, MicroBatch]]:
    if settings.trainer.trains:
        yield "actor.micro_batch", settings.actor.micro_batch
        if settings.has_critic:
            yield "critic.micro_batch", settings.critic.micro_batch
    if settings.trainer.generates:
        yield "actor.scoring_micro_batch", settings.actor.scoring_micro_batch
    if settings.trainer.makes_experience:
        for role in (("critic",) if settings.has_critic else ()) + ("reference", "reward_model"):
            yield f"{role}.scoring_micro_batch", getattr(settings, role).scoring_micro_batch


def _supervised(settings: Settings, program: Program) -> Iterator[str]:
    supervised = settings.supervised
    # The two sequences of a preference pair share a micro-batch.
    row, what = (2, "a preference pair of 2 x") if program == "reward_model" else (1, "a row of")
    if not supervised.path:
        yield "supervised.path: null; name the Hugging Face directory that training starts from"
    if not settings.data.train:
        yield "data.train: []; name the files to train on"
    tokens, sequences = supervised.micro_batch.tokens, supervised.micro_batch.sequences
    if tokens is not None and tokens < row * supervised.max_tokens:
        yield (
            f"supervised.micro_batch.tokens: {tokens} cannot hold {what} supervised.max_tokens {supervised.max_tokens}; "
            f"set it to {row * supervised.max_tokens} or more"
        )
    if sequences is not None and sequences < row:
        yield f"supervised.micro_batch.sequences: {sequences} cannot hold a preference pair; set it to {row} or more"
    if settings.medusa.enabled and program == "reward_model":
        yield (
            "medusa.enabled: true, but a reward model writes no text that draft heads could guess; set medusa.enabled=false, "
            "and train the heads in sft"
        )


def _idle_ranks(settings: Settings, program: Program, data_parallel: int) -> Iterator[str]:
    """Every data-parallel rank needs a sequence of each optimizer step."""
    key, size = _optimizer_step(settings, program)
    if size < data_parallel:
        yield f"{key}: {size} is less than the data-parallel size; set it to {data_parallel} or more, or start fewer ranks"


def _optimizer_step(settings: Settings, program: Program) -> tuple[str, int]:
    """What sets the rows of one optimizer step, and how many these are."""
    if program in ("sft", "reward_model"):
        return "supervised.batch_size", settings.supervised.batch_size
    if program == "train" and settings.algorithm.mini_batch_sequences is not None:
        return "algorithm.mini_batch_sequences", settings.algorithm.mini_batch_sequences
    prompts, samples = settings.data.prompts_per_iteration, settings.rollout.samples_per_prompt
    return "data.prompts_per_iteration x rollout.samples_per_prompt", prompts * samples


def _nearest_divisor(total: int, size: int) -> int:
    return min((d for d in range(1, total + 1) if total % d == 0), key=lambda d: abs(d - size))

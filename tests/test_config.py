"""The records' own checks and what must agree between sections: each fault is named with its key, value and fix."""

import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass

import pytest
from pydantic import ValidationError

from rlhf_mc.config import ConfigError, MicroBatch, Optim, Parallel, RewardFunction, Settings
from rlhf_mc.recipe import load_settings

TRAIN = ["actor.path=actor", "reward_model.path=reward", "data.train=[prompts.jsonl]"]
SUPERVISED = ["supervised.path=base", "data.train=[pairs.jsonl]"]
HEADS = ["trainer.mode=heads", "medusa.enabled=true", "actor.path=actor", "data.train=[prompts.jsonl]"]


def settings_of(*overrides: str) -> Settings:
    return load_settings(list(overrides))[0]


def errors_of(program: str, *overrides: str, world_size: int | None = None) -> list[str]:
    """The messages of a refused check, one a fault."""
    with pytest.raises(ConfigError) as caught:
        settings_of(*overrides).check(program, world_size)
    lines = str(caught.value).split("\n  ")
    return lines[1:] if lines[0].endswith("settings are wrong:") else lines


@pytest.mark.parametrize("module", ["rlhf_mc.config", "rlhf_mc.recipe", "rlhf_mc.config_keys"])
def test_import_loads_neither_torch_nor_vllm_nor_megatron(module):
    program = f"import sys, {module}; print([m for m in ('torch', 'vllm', 'megatron', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_records_are_frozen_and_refuse_unknown_fields():
    with pytest.raises(FrozenInstanceError):
        Settings().trainer.seed = 2
    with pytest.raises(ValidationError, match="learning_rate"):
        Optim(learning_rate=1e-6)


@pytest.mark.parametrize("program, overrides", [("train", TRAIN), ("sft", SUPERVISED), ("reward_model", SUPERVISED), ("heads", HEADS)])
@pytest.mark.parametrize("world_size", [None, 1, 2, 64])
def test_defaults_with_paths_pass(program, overrides, world_size):
    settings_of(*overrides).check(program, world_size)


def test_every_micro_batch_and_optimizer_is_checked():
    """A section that holds one must pass its check on; counted so that a new section cannot be forgotten."""
    leaves = {
        f"{section.name}.{field.name}": value
        for section in fields(Settings)
        for field in fields(getattr(Settings(), section.name))
        if is_dataclass(value := getattr(getattr(Settings(), section.name), field.name))
    }
    assert len(leaves) >= 11
    for key, value in leaves.items():
        bad = {MicroBatch: "tokens=0", Optim: "lr=-1"}.get(type(value), "coef=-1")
        (message,) = errors_of("train", *TRAIN, f"{key}.{bad}")
        assert message.startswith(key)


SECTION_FAULTS = [
    ("trainer.iterations=-1", "trainer.iterations: -1"),
    ("trainer.evaluate_every=-1", "trainer.evaluate_every: -1"),
    ("trainer.trace_iterations=-1", "trainer.trace_iterations: -1"),
    ("trainer.keep_best=-1", "trainer.keep_best: -1"),
    ("trainer.export_every=-1", "trainer.export_every: -1"),
    ("trainer.best_by='-'", "trainer.best_by: '-' names no metric"),
    ("guard.max_bad_updates=0", "guard.max_bad_updates: 0"),
    ("guard.max_score=0", "guard.max_score: 0.0"),
    ("guard.max_ratio=1", "guard.max_ratio: 1.0 must exceed 1"),
    ("guard.max_grad_norm=0", "guard.max_grad_norm: 0.0"),
    ("watchdog.seconds=0", "watchdog.seconds: 0.0"),
    ("watchdog.factor=0.5", "watchdog.factor: 0.5"),
    ("data.prompts_per_iteration=0", "data.prompts_per_iteration: 0"),
    ("data.max_prompt_tokens=0", "data.max_prompt_tokens: 0"),
    ("parallel.tensor=0", "parallel.tensor: 0"),
    ("parallel.context=0", "parallel.context: 0"),
    ("parallel.pipeline=-2", "parallel.pipeline: -2"),
    ("parallel.virtual_pipeline=0", "parallel.virtual_pipeline: 0"),
    ("parallel.virtual_pipeline=2", "parallel.virtual_pipeline: 2 chunks take turns"),
    ("supervised.epochs=0", "supervised.epochs: 0"),
    ("supervised.batch_size=0", "supervised.batch_size: 0"),
    ("actor.optim.lr=-1e-6", "actor.optim.lr: -1e-06"),
    ("actor.optim.min_lr=1", "actor.optim.min_lr: 1.0 must lie between 0 and actor.optim.lr = 1e-06"),
    ("actor.optim.warmup_steps=-1", "actor.optim.warmup_steps: -1"),
    ("actor.optim.clip_grad=0", "actor.optim.clip_grad: 0.0 must be positive"),
    ("actor.micro_batch.sequences=4", "actor.micro_batch: set exactly one of tokens (4096) and sequences (4)"),
    ("actor.micro_batch.tokens=null", "actor.micro_batch: set exactly one of tokens (None) and sequences (None)"),
    ("actor.micro_batch={tokens: null, sequences: 0}", "actor.micro_batch: 0 is not a positive size"),
    ("actor.clip_ratio_low=1", "actor.clip_ratio_low: 1.0"),
    ("actor.clip_ratio_high=0", "actor.clip_ratio_high: 0.0"),
    ("actor.dual_clip=1", "actor.dual_clip: 1.0 must exceed 1"),
    ("actor.ptx_coef=-1", "actor.ptx_coef: -1.0"),
    ("critic.value_clip=0", "critic.value_clip: 0.0"),
    ("critic.warmup_iterations=-1", "critic.warmup_iterations: -1"),
    ("reference.scoring_micro_batch.sequences=1", "reference.scoring_micro_batch: set exactly one"),
    ("reward_model.scoring_micro_batch.sequences=1", "reward_model.scoring_micro_batch: set exactly one"),
    ("reward.num_workers=0", "reward.num_workers: 0"),
    ("reward.timeout_seconds=0", "reward.timeout_seconds: 0.0"),
    ("reward.max_error_rate=1.5", "reward.max_error_rate: 1.5"),
    ("reward.functions=[{path: 'm:f'}, {path: 'n:f'}]", "reward.functions: the name f is used twice"),
    ("reward.functions=[{path: m.f}]", "reward.functions: path 'm.f' must read package.module:function"),
    ("rollout.tensor_parallel=0", "rollout.tensor_parallel: 0"),
    ("rollout.engine_ranks=1", "rollout.engine_ranks: 1, but rollout.placement: colocated"),
    ("rollout.placement=separate", "rollout.engine_ranks: 0, but rollout.placement: separate needs ranks"),
    (
        "rollout={placement: separate, engine_ranks: 3, tensor_parallel: 2}",
        "rollout.engine_ranks: 3 cannot be divided into replicas of rollout.tensor_parallel 2; set rollout.engine_ranks=2",
    ),
    ("rollout.samples_per_prompt=0", "rollout.samples_per_prompt: 0"),
    ("rollout.temperature=0", "rollout.temperature: 0.0"),
    ("rollout.top_p=0.9", "rollout: top_p=0.9, top_k=-1"),
    ("rollout.top_k=50", "rollout: top_p=1.0, top_k=50"),
    ("rollout.min_tokens=200", "rollout: need 0 <= min_tokens (200) <= max_tokens (128)"),
    ("rollout.max_tokens=0", "rollout: need 0 <= min_tokens (0) <= max_tokens (0)"),
    ("rollout.kv_cache_gib=0", "rollout.kv_cache_gib: 0.0"),
    ("algorithm.gamma=0", "algorithm.gamma: 0.0"),
    ("algorithm.lam=1.1", "algorithm.lam: 1.1"),
    ("algorithm.epochs=0", "algorithm.epochs: 0"),
    ("algorithm.mini_batch_sequences=0", "algorithm.mini_batch_sequences: 0 is not positive"),
    ("algorithm.kl.estimator=k3", "algorithm.kl.estimator: k3 is for algorithm.kl.use=loss"),
    ("algorithm.kl.use=loss", "algorithm.kl.estimator: k1 as a loss"),
    ("algorithm.kl.coef=-1", "algorithm.kl.coef: -1.0"),
    ("algorithm.kl.target=0", "algorithm.kl.target: 0.0"),
    ("algorithm.kl.horizon=0", "algorithm.kl.horizon: 0"),
    ("algorithm.kl={use: none, target: 6}", "algorithm.kl.target: 6.0 steers nothing under algorithm.kl.use=none"),
    ("algorithm.kl={coef: 0, target: 6}", "algorithm.kl.coef: the controller of algorithm.kl.target multiplies it"),
]


@pytest.mark.parametrize("override, message", SECTION_FAULTS)
@pytest.mark.parametrize("program", ["train", "sft"])
def test_fault_inside_a_section(program, override, message):
    (error,) = errors_of(program, *TRAIN, *SUPERVISED, override)
    assert error.startswith(message)


def test_faults_of_all_sections_come_together():
    errors = errors_of("train", *TRAIN, "trainer.iterations=-1", "actor.dual_clip=0.5", "algorithm.lam=2")
    assert [error.split(":")[0] for error in errors] == ["trainer.iterations", "actor.dual_clip", "algorithm.lam"]


def test_what_ppo_needs_is_named_all_at_once():
    errors = errors_of("train")
    assert [error.split(":")[0] for error in errors] == ["actor.path", "critic.path", "reward_model.path", "data.train"]
    assert "reward_model.path" in errors[1] and "reward.functions: []" in errors[2]


@pytest.mark.parametrize("program", ["sft", "reward_model"])
def test_what_supervised_training_needs_is_named_all_at_once(program):
    assert [error.split(":")[0] for error in errors_of(program)] == ["supervised.path", "data.train"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["reward_model.weight=0"],
        ["reward_model.path=null", "critic.path=critic"],
        ["reward_model.path=null", "critic.path=critic", "reward.functions=[{path: 'm:f', weight: 0}]"],
    ],
)
def test_nothing_that_pays(overrides):
    (error,) = errors_of("train", *TRAIN, *overrides)
    assert error.startswith("reward_model.path:") and "pay nothing" in error


@pytest.mark.parametrize(
    "overrides",
    [
        ["reward_model.path=null", "critic.path=critic", "reward.functions=[{path: 'm:f'}]"],
        ["reward_model.weight=0", "reward.functions=[{path: 'm:f', weight: -1}]"],
        ["actor.ptx_coef=0.1", "data.ptx=[text.jsonl]"],
        ["algorithm.mini_batch_sequences=16", "data.prompts_per_iteration=16", "rollout.samples_per_prompt=4"],
        ["algorithm.kl={use: loss, estimator: k3}"],
        ["algorithm.kl.target=6"],
        ["algorithm.kl.use=none"],
        ["algorithm.advantages=rloo", "rollout.samples_per_prompt=2", "reward_model.path=null", "reward.functions=[{path: 'm:f'}]"],
        ["algorithm.advantages=grpo", "rollout.samples_per_prompt=4", "critic.micro_batch.tokens=1"],
        ["actor.micro_batch={tokens: null, sequences: 2}"],
        ["trainer.keep_best=1", "data.validation=[v.jsonl]", "trainer.save_every=4", "trainer.evaluate_every=2"],
        ["trainer.keep_best=1", "trainer.save_every=4", "trainer.best_by=-actor/ppo_kl"],
        ["watchdog.seconds=null"],
    ],
)
def test_variants_that_are_fine(overrides):
    settings_of(*TRAIN, *overrides).check("train", 2)


BEST = ["trainer.keep_best=1", "data.validation=[v.jsonl]", "trainer.save_every=4"]
CONTRADICTIONS = [
    (["trainer.keep_best=1"], "trainer.keep_best: 1, but trainer.save_every: 0 makes no checkpoints", "set it"),
    (BEST, "trainer.best_by: val/reward_model, but nothing is measured", "trainer.evaluate_every: 0); set both"),
    ([*BEST, "trainer.evaluate_every=3"], "trainer.save_every: 4 is no multiple of trainer.evaluate_every: 3", "have no val/reward_model"),
    (["algorithm.advantages=grpo"], "rollout.samples_per_prompt: 1, but algorithm.advantages: grpo compares", "set it to 2 or more"),
    (
        ["algorithm.advantages=rloo", "rollout.samples_per_prompt=2", "critic.path=critic"],
        "critic.path: critic, but algorithm.advantages: rloo has no critic",
        "set critic.path=null",
    ),
    (["actor.ptx_coef=0.5"], "data.ptx: [], but actor.ptx_coef: 0.5 needs text", "set actor.ptx_coef=0"),
    (["data.ptx=[a.jsonl]"], "actor.ptx_coef: 0, so that data.ptx: ['a.jsonl'] would never be read", "set data.ptx=[]"),
    (
        ["algorithm.mini_batch_sequences=30", "rollout.samples_per_prompt=2"],
        "algorithm.mini_batch_sequences: 30 does not divide data.prompts_per_iteration 64 x rollout.samples_per_prompt 2 = 128",
        "the nearest that does is 32",
    ),
    (
        ["rollout.tensor_parallel=3", "parallel.tensor=2", "parallel.pipeline=2"],
        "rollout.tensor_parallel: 3 does not divide parallel.tensor 2 x parallel.pipeline 2 = 4",
        "the nearest that does is 2",
    ),
    (
        ["actor.micro_batch.tokens=600"],
        "actor.micro_batch.tokens: 600 cannot hold a sequence of data.max_prompt_tokens 512 + rollout.max_tokens 128",
        "set it to 640 or more",
    ),
    (["critic.micro_batch.tokens=639"], "critic.micro_batch.tokens: 639", "640"),
    *(
        ([f"{role}.scoring_micro_batch.tokens=1"], f"{role}.scoring_micro_batch.tokens: 1 cannot hold", "640")
        for role in ("actor", "critic", "reference", "reward_model")
    ),
]


@pytest.mark.parametrize("overrides, message, fix", CONTRADICTIONS)
def test_contradiction_between_sections_of_ppo(overrides, message, fix):
    (error,) = errors_of("train", *TRAIN, *overrides)
    assert error.startswith(message) and fix in error
    settings_of(*SUPERVISED, *overrides).check("sft")  # which reads none of these


UPDATE = ["trainer.mode=update", "rollout.replay_dir=rollouts", "actor.path=actor", "critic.path=critic"]


@pytest.mark.parametrize(
    "overrides, message, fix",
    [
        (["trainer.mode=update"], "rollout.replay_dir: null, but trainer.mode: update trains on", "a run with rollout.dump=true wrote"),
        ([*UPDATE, "rollout.dump=true"], "rollout.dump: true, but trainer.mode: update makes no rollouts", "set rollout.dump=false"),
        (["rollout.replay_dir=r"], "rollout.replay_dir: r would never be read under trainer.mode: ppo", "set trainer.mode=update, or"),
        (
            [*UPDATE, "rollout.placement=separate", "rollout.engine_ranks=2"],
            "rollout.placement: separate, but trainer.mode: update generates nothing",
            "set rollout.placement=colocated and rollout.engine_ranks=0",
        ),
        (
            ["trainer.mode=rollout", "trainer.export_every=2"],
            "trainer.export_every: 2, but trainer.mode: rollout trains nothing",
            "set trainer.export_every=0",
        ),
        (["trainer.mode=rollout", "rollout.replay_dir=r"], "rollout.replay_dir: r would never be read under trainer.mode: rollout", "null"),
    ],
)
def test_mode_that_contradicts_the_rollouts(overrides, message, fix):
    (error,) = errors_of("train", *TRAIN, *overrides)
    assert error.startswith(message) and fix in error
    settings_of(*SUPERVISED, *overrides).check("sft")


@pytest.mark.parametrize("free", ["actor.scoring_micro_batch.tokens=1", "rollout.tensor_parallel=3", "reward_model.weight=0"])
def test_update_asks_for_nothing_that_only_rollouts_need(free):
    settings_of(*UPDATE, free).check("train", 2)
    assert errors_of("train", *TRAIN, free)


def test_rollouts_ask_for_nothing_that_only_updates_need():
    free = "actor.micro_batch.tokens=1"
    settings_of(*TRAIN, "trainer.mode=rollout", free).check("train", 2)
    assert errors_of("train", *TRAIN, free)


@pytest.mark.parametrize(
    "mode, generates, makes_experience, trains",
    [("ppo", True, True, True), ("rollout", True, True, False), ("update", False, False, True), ("heads", True, False, False)],
)
def test_what_a_mode_does(mode, generates, makes_experience, trains):
    settings = settings_of(f"trainer.mode={mode}")
    trainer = settings.trainer
    assert (trainer.generates, trainer.makes_experience, trainer.trains) == (generates, makes_experience, trains)
    assert trainer.evaluates == (mode == "ppo") and settings.trains_heads == (mode != "rollout")
    assert not settings_of(f"trainer.mode={mode}", "medusa.train=false").trains_heads
    assert settings.dumps == (mode == "rollout") and settings_of("rollout.dump=true").dumps


@pytest.mark.parametrize(
    "overrides, message, fix",
    [
        (["trainer.mode=ppo"], "trainer.mode: ppo, but this program trains draft heads alone", "or start rlhf_mc.train"),
        (["actor.path=null"], "actor.path: null", "name the Hugging Face directory"),
        (["medusa.enabled=false"], "medusa.enabled: false, but this program trains draft heads", "set medusa.enabled=true"),
        (["medusa.train=false"], "medusa.train: false leaves the draft heads as they are", "set medusa.train=true"),
        (["data.train=[]"], "data.train: []", "name the files"),
        (["trainer.export_every=2"], "trainer.export_every: 2, but this program writes the draft heads at its end only", "set trainer.export_every=0"),
        (["rollout.dump=true"], "rollout.dump: true, but draft heads are trained without rewards", "set rollout.dump=false"),
        (["rollout.max_tokens=3"], "medusa.num_heads: 3, but a response has rollout.max_tokens: 3", "set it to 2 or less"),
        (["rollout.tensor_parallel=2"], "rollout.tensor_parallel: 2 does not divide", "1"),
        (["actor.scoring_micro_batch.tokens=1"], "actor.scoring_micro_batch.tokens: 1 cannot hold", "640"),
    ],
)
def test_contradiction_of_heads_alone(overrides, message, fix):
    (error,) = errors_of("heads", *HEADS, *overrides)
    assert error.startswith(message) and fix in error


def test_heads_alone_ask_for_nothing_that_only_ppo_needs():
    free = ["critic.scoring_micro_batch.tokens=1", "actor.micro_batch.tokens=1", "algorithm.mini_batch_sequences=7", "actor.ptx_coef=1"]
    settings_of(*HEADS, *free).check("heads", 2)
    separate = ["rollout.placement=separate", "rollout.engine_ranks=1"]
    settings_of(*HEADS, *separate).check("heads", 2)
    (error,) = errors_of("heads", *HEADS, *separate, world_size=1)
    assert error.startswith("rollout.engine_ranks: 1 of 1 ranks leaves none")


def test_heads_alone_have_a_program_of_their_own():
    (error,) = errors_of("train", *TRAIN, "trainer.mode=heads")
    assert error.startswith("trainer.mode: heads, but this program is for PPO; start rlhf_mc.stages.heads")


def test_heads_in_supervised_training():
    settings = settings_of(*SUPERVISED, "medusa.enabled=true")
    settings.check("sft", 2)
    assert settings.trains_heads_alone and not settings_of(*SUPERVISED).trains_heads_alone
    assert not settings_of(*SUPERVISED, "medusa.enabled=true", "medusa.joint_weight=0.2").trains_heads_alone
    (error,) = errors_of("reward_model", *SUPERVISED, "medusa.enabled=true")
    assert error.startswith("medusa.enabled: true, but a reward model writes no text") and "set medusa.enabled=false" in error


def test_files_of_an_iteration():
    settings = settings_of("trainer.output_dir=out", "rollout.replay_dir=out/rollouts")
    assert str(settings.dump_file(12)) == "out/rollouts/000012.jsonl" == str(settings.replay_file(12))


def test_supervised_row_that_fits_no_micro_batch():
    overrides = [*SUPERVISED, "supervised.max_tokens=5000"]
    (error,) = errors_of("sft", *overrides)
    assert error.startswith("supervised.micro_batch.tokens: 4096 cannot hold a row of supervised.max_tokens 5000")
    settings_of(*TRAIN, *overrides).check("train")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["supervised.max_tokens=2100"],
            "supervised.micro_batch.tokens: 4096 cannot hold a preference pair of 2 x supervised.max_tokens 2100; set it to 4200",
        ),
        (
            ["supervised.micro_batch.tokens=null", "supervised.micro_batch.sequences=1"],
            "supervised.micro_batch.sequences: 1 cannot hold a preference pair; set it to 2 or more",
        ),
    ],
)
def test_preference_pair_that_fits_no_micro_batch(overrides, message):
    (error,) = errors_of("reward_model", *SUPERVISED, *overrides)
    assert error.startswith(message)
    settings_of(*SUPERVISED, *overrides).check("sft")


@pytest.mark.parametrize(
    "tensor, context, pipeline, world_size, data",
    [(1, 1, 1, 1, 1), (2, 1, 1, 8, 4), (2, 1, 2, 4, 1), (1, 2, 1, 8, 4), (2, 2, 2, 8, 1), (8, 2, 4, 128, 2)],
)
def test_data_parallel_size(tensor, context, pipeline, world_size, data):
    assert Parallel(tensor=tensor, context=context, pipeline=pipeline).data(world_size) == data


@pytest.mark.parametrize("program, base", [("train", TRAIN), ("sft", SUPERVISED), ("reward_model", SUPERVISED)])
def test_layout_that_does_not_divide_the_ranks(program, base):
    (error,) = errors_of(program, *base, "parallel.tensor=2", "parallel.pipeline=2", world_size=6)
    groups = "groups of tensor 2 x context 1 x pipeline 2 = 4"
    assert error.startswith(f"parallel: 6 ranks cannot be divided into {groups}; start a multiple of 4 ranks")
    (error,) = errors_of(program, *base, "parallel.context=4", world_size=6)
    assert error.startswith("parallel: 6 ranks cannot be divided into groups of tensor 1 x context 4 x pipeline 1 = 4; start")


@pytest.mark.parametrize(
    "program, base, batch, key",
    [
        ("train", TRAIN, "algorithm.mini_batch_sequences=4", "algorithm.mini_batch_sequences: 4"),
        ("train", TRAIN, "data.prompts_per_iteration=4", "data.prompts_per_iteration x rollout.samples_per_prompt: 4"),
        ("sft", SUPERVISED, "supervised.batch_size=4", "supervised.batch_size: 4"),
        ("reward_model", SUPERVISED, "supervised.batch_size=4", "supervised.batch_size: 4"),
    ],
)
def test_optimizer_step_smaller_than_the_data_parallel_size(program, base, batch, key):
    (error,) = errors_of(program, *base, batch, "parallel.tensor=2", world_size=16)
    assert error == f"{key} is less than the data-parallel size; set it to 8 or more, or start fewer ranks"
    settings_of(*base, batch, "parallel.tensor=2").check(program, 8)
    settings_of(*base, batch, "parallel.tensor=2").check(program)


SEPARATE = ["rollout.placement=separate", "rollout.engine_ranks=3", "rollout.tensor_parallel=3", "parallel.tensor=2"]


def test_separate_engines_leave_the_training_grid_alone():
    settings_of(*TRAIN, *SEPARATE).check("train", 7)  # a rollout TP that divides nothing of the trainer's
    (error,) = errors_of("train", *TRAIN, *SEPARATE, world_size=3)
    assert error == "rollout.engine_ranks: 3 of 3 ranks leaves none to train on; start 5 ranks or more, or lower it"
    (error,) = errors_of("train", *TRAIN, *SEPARATE, world_size=6)
    assert error.startswith("parallel: 3 ranks cannot be divided") and "multiple of 2 ranks, and rollout.engine_ranks 3 more" in error
    settings_of(*SUPERVISED, *SEPARATE).check("sft", 2)  # which has no engines


def test_reward_function_label():
    assert RewardFunction(path="package.module:exact").label == "exact"
    assert RewardFunction(path="file.py:exact", name="mine").label == "mine"


def test_check_changes_nothing():
    settings = settings_of(*TRAIN)
    before = asdict(settings)
    settings.check("train", 2)
    assert asdict(settings) == before

"""Reading recipes and overrides, what is said about wrong ones, writing them back, and the files that they name."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings as hypothesis_settings
from hypothesis import strategies as st

from rlhf_mc.config import ConfigError, Optim, Reward, RewardFunction, Settings, Trainer, Wandb
from rlhf_mc.config_keys import all_keys
from rlhf_mc.recipe import CommandLine, check_files, load_settings, to_yaml

RECIPES = sorted((Path(__file__).parents[1] / "scripts" / "configs").glob("*.yaml"))


def settings_of(*argv: str) -> Settings:
    return load_settings(list(argv))[0]


def message_of(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(list(argv))
    return str(caught.value)


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe's text and returns its path."""

    def write(text: str, name: str = "recipe.yaml") -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


# ---- what is read


def test_nothing_given_means_defaults():
    assert load_settings([]) == (Settings(), CommandLine(False, False, None, ()))


def test_the_mode_of_heads_alone_is_the_default_of_its_program(recipe):
    assert load_settings([], "heads")[0] == replace(Settings(), trainer=Trainer(mode="heads"))
    path = recipe("trainer: {mode: ppo}\n")
    assert load_settings(["--config", path], "heads")[0].trainer.mode == "ppo", "said on purpose, and refused by the check"


def test_arguments_of_the_process_are_the_default(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train", "trainer.seed=7", "--dry-run"])
    settings, command = load_settings()
    assert settings.trainer.seed == 7 and command.dry_run


def test_recipe_then_overrides_in_any_order(recipe):
    path = recipe("trainer: {seed: 2, iterations: 3}\nactor:\n  optim:\n    lr: 3e-6\n")
    settings, command = load_settings(["trainer.seed=4", "--config", path, "--print-config", "trainer.seed=5"])
    assert (settings.trainer.seed, settings.trainer.iterations, settings.actor.optim.lr) == (5, 3, 3e-6)
    assert command == CommandLine(True, False, Path(path), ("trainer.seed=4", "trainer.seed=5"))


@pytest.mark.parametrize("given", ["critic.optim.warmup_steps=5", "critic.optim={warmup_steps: 5}"])
def test_part_of_a_section_keeps_the_other_defaults_of_its_place(recipe, given):
    key, _, value = given.rpartition("=")
    nested = f"critic: {{optim: {value if key == 'critic.optim' else '{warmup_steps: 5}'}}}"
    for settings in (settings_of(given), settings_of("--config", recipe(nested))):
        assert settings.critic.optim == Optim(lr=1e-5, warmup_steps=5)


def test_base_is_found_from_the_recipe_and_merged_deeply(recipe):
    recipe("trainer: {seed: 1, iterations: 1}\ndata: {train: [a, b]}\n", "shared/first.yaml")
    recipe("base: first.yaml\ntrainer: {seed: 2}\nactor: {optim: {lr: 1e-5, eps: 1e-6}}\n", "shared/second.yaml")
    path = recipe("base: shared/second.yaml\ndata: {train: [c]}\nactor: {optim: {lr: 2e-5}}\n")
    settings = settings_of("--config", path)
    assert settings.trainer == Trainer(seed=2, iterations=1)
    assert settings.data.train == ["c"]  # a list replaces a list
    assert settings.actor.optim == Optim(lr=2e-5, eps=1e-6)


@pytest.mark.parametrize(
    "override, value",
    [
        ("actor.optim.lr=1e-6", 1e-6),
        ("actor.optim.lr=5E+2", 500.0),
        ("actor.optim.lr=.5", 0.5),
        ("actor.optim.lr=3", 3.0),
        ("actor.dual_clip=null", None),
        ("actor.dual_clip=", None),
        ("actor.path=/models/a=b", "/models/a=b"),
        ("actor.path='3'", "3"),
        ("rollout.top_k=-1", -1),
        ("data.shuffle=false", False),
        ("data.train=[a.jsonl, b.parquet]", ["a.jsonl", "b.parquet"]),
        ("wandb.name=on", "on"),
        ("wandb.name=12:30", "12:30"),
        ("wandb.name=2026-01-01", "2026-01-01"),
        ("wandb.name=007", "007"),
        ("wandb.name='null'", "null"),
    ],
)
def test_value_is_yaml(override, value):
    read = settings_of(override)
    for part in override.split("=")[0].split("."):
        read = getattr(read, part)
    assert read == value and type(read) is type(value)


def test_override_of_a_mapping_merges():
    settings = settings_of("actor.optim.eps=1e-6", "actor.optim={lr: 2e-6}", "actor.optim.beta2=0.99")
    assert settings.actor.optim == Optim(lr=2e-6, eps=1e-6, beta2=0.99)


def test_override_of_a_list_element(recipe):
    path = recipe("reward: {functions: [{path: 'm:f'}, {path: 'm:g', weight: 2}]}\ndata: {train: [a, b]}\n")
    settings = settings_of(
        "--config", path, "reward.functions.1.weight=0.5", "reward.functions.0.arguments.strict=true", "data.train.1=c"
    )
    assert settings.reward.functions == [RewardFunction("m:f", arguments={"strict": True}), RewardFunction("m:g", weight=0.5)]
    assert settings.data.train == ["a", "c"]


def test_reading_leaves_the_defaults_alone():
    settings_of("reward.functions=[{path: 'm:f'}]", "actor.optim.lr=1", "wandb.tags=[a]")
    assert settings_of() == Settings() and Settings().reward == Reward()


# ---- what is refused


@pytest.mark.parametrize(
    "written, nearest",
    [
        ("actor.optim.lrr", "actor.optim.lr"),
        ("actr", "actor"),
        ("actr.path", "actor.path"),
        ("rollout.temprature", "rollout.temperature"),
        ("algorithm.kl.estimater", "algorithm.kl.estimator"),
        ("actor.lr", "actor.optim.lr"),  # parts left out
        ("kl.use", "algorithm.kl.use"),
        ("optim.clip_grad", "actor.optim.clip_grad"),
    ],
)
def test_unknown_key_suggests_the_nearest(recipe, written, nearest):
    sentence = f"{written}: no such key; did you mean {nearest}?"
    assert message_of(f"{written}=1") == sentence
    assert message_of(written) == sentence  # an unknown key without a value is first of all unknown


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("actor: {optim: {lrr: 1}}", "actor.optim.lrr: no such key; did you mean actor.optim.lr?"),
        ("actr: {path: x}", "actr: no such key; did you mean actor?"),
        ("kl: {use: loss}", "kl: no such key; did you mean algorithm.kl?"),
        ("xyzzy: 1", "xyzzy: no such key; docs/configuration.md lists all keys"),
        (
            "reward: {functions: [{path: 'm:f'}, {path: 'm:g', wait: 1}]}",
            "reward.functions.1.wait: no such key; did you mean reward.functions.N.weight?",
        ),
        ("reward: {functions: [{weight: 1}]}", "reward.functions.0.path: missing; expected str"),
        ("reward: {functions: ['m:f']}", 'reward.functions.0: "m:f" is str; expected mapping'),
        ("reward: {functions: {path: 'm:f'}}", 'reward.functions: {"path": "m:f"} is dict; expected list of mapping'),
        ("data: {train: [a, 3]}", 'data.train.1: 3 is int; expected str (quote it: "3")'),
        ("actor:", "actor: null; expected mapping"),
        ("actor: model", 'actor: "model" is str; expected mapping'),
        ("actor: {optim: 1e-6}", "actor.optim: 1e-06 is float; expected mapping"),
    ],
)
def test_fault_in_a_recipe(recipe, text, sentence):
    assert message_of("--config", recipe(text)) == sentence


@pytest.mark.parametrize(
    "override, sentence",
    [
        ("actor.optim.lr=fast", 'actor.optim.lr: "fast" is str; expected float'),
        ("actor.optim.lr='1e-6'", 'actor.optim.lr: "1e-6" is str; expected float'),
        ("actor.optim.lr=null", "actor.optim.lr: null; expected float"),
        ("actor.optim.lr=true", "actor.optim.lr: true is bool; expected float"),
        ("actor.optim.lr=.nan", "actor.optim.lr: nan is not a finite number; expected float"),
        ("actor.dual_clip=.inf", "actor.dual_clip: inf is not a finite number; expected float or null"),
        ("actor.dual_clip=no", 'actor.dual_clip: "no" is str; expected float or null'),
        ("trainer.seed=1.0", "trainer.seed: 1.0 is float; expected int"),
        ("trainer.seed=010", 'trainer.seed: "010" is str; expected int'),
        ("trainer.seed=[1]", "trainer.seed: [1] is list; expected int"),
        ("data.shuffle=1", "data.shuffle: 1 is int; expected bool"),
        ("data.shuffle=yes", 'data.shuffle: "yes" is str; expected bool'),
        ("data.train=a.jsonl", 'data.train: "a.jsonl" is str; expected list of str'),
        ("wandb.name=17", 'wandb.name: 17 is int; expected str or null (quote it: "17")'),
        ("trainer.device=gpu", 'trainer.device: "gpu" is str; expected one of auto, cpu, cuda'),
        ("algorithm.mini_batch_sequences=2.5", "algorithm.mini_batch_sequences: 2.5 is float; expected int or null"),
        ("actor.optim.lr", "actor.optim.lr: an override needs a value; write actor.optim.lr=VALUE"),
        ("=3", "'': no such key; docs/configuration.md lists all keys"),
        ("data.train.0=a", "data.train.0: data.train is a list of 0 and has no 0; override data.train as a whole"),
        (
            "reward.functions.0.weight=1",
            "reward.functions.0: reward.functions is a list of 0 and has no 0; override reward.functions as a whole",
        ),
    ],
)
def test_fault_in_an_override(override, sentence):
    assert message_of(override) == sentence


def test_override_that_is_not_yaml():
    assert message_of("data.train=[a").startswith("data.train: '[a' is not YAML (")
    assert "could not determine a constructor" in message_of("wandb.name=!!set {a}")


def test_long_value_is_cut():
    message = message_of(f"actor.optim.lr=[{', '.join('1' * 100)}]")
    assert message.startswith("actor.optim.lr: [1, 1") and "... is list" in message and len(message) < 120


def test_all_faults_come_at_once(recipe):
    path = recipe("actor: {optim: {lr: x}, pth: y}\ntrainer: {seed: z}\n")
    lines = message_of("--config", path, "critc.path=c", "wandb.name", "rollout.top_p=high").split("\n  ")
    assert lines[0] == "6 settings are wrong:"
    assert {line.split(":")[0] for line in lines[1:]} == {
        "actor.optim.lr", "actor.pth", "trainer.seed", "critc.path", "wandb.name", "rollout.top_p"
    }  # fmt: skip


@pytest.mark.parametrize("argument", ["--actor.optim.lr=1", "--confg=x", "--config", "-x"])
def test_wrong_option_is_a_config_error(argument):
    message = message_of(argument)
    assert message.startswith("command line: ") and "section.key=value, without dashes" in message and "usage: train" in message


def test_help_names_the_page_of_keys(capsys):
    with pytest.raises(SystemExit) as caught:
        load_settings(["--help"], program="sft")
    assert caught.value.code == 0
    assert "usage: sft" in (text := capsys.readouterr().out) and "docs/configuration.md" in text


def test_missing_recipe(tmp_path):
    path = tmp_path / "none.yaml"
    assert message_of("--config", str(path)) == f"--config: cannot read {path} (No such file or directory); name a YAML file"


def test_missing_base(recipe, tmp_path):
    path = recipe("base: none.yaml")
    assert message_of("--config", path).startswith(f"base of {path}: cannot read {tmp_path / 'none.yaml'}")


def test_base_in_a_circle(recipe):
    first = recipe("base: b.yaml", "a.yaml")
    recipe("base: a.yaml", "b.yaml")
    assert "a.yaml is a circle" in message_of("--config", first)
    assert "self.yaml is a circle" in message_of("--config", recipe("base: self.yaml", "self.yaml"))


@pytest.mark.parametrize(
    "text, part",
    [
        ("actor: [", "not YAML"),
        ("actor: {path: x}\nactor: {path: y}", "the key actor comes twice"),
        ("actor: {path: x, path: y}", "the key path comes twice"),
        ("- actor", '["actor"] is list; a recipe holds sections'),
        ("base: [a.yaml]", 'base: ["a.yaml"] is not the name of one YAML file'),
        ("a: \udcff", "not YAML"),
    ],
)
def test_file_that_is_no_recipe(tmp_path, text, part):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    message = message_of("--config", str(path))
    assert message.startswith(f"{path}: ") and part in message


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_empty_recipe_means_defaults(recipe, text):
    assert settings_of("--config", recipe(text)) == Settings()


# ---- what is written


def test_yaml_holds_every_key_in_order():
    lines = [line.strip().split(":")[0] for line in to_yaml(Settings()).splitlines()]
    written = iter(lines)
    assert all(key.name.rpartition(".")[2] in written for key in all_keys() if ".N." not in key.name)
    assert lines[0] == "trainer" and lines.index("data") < lines.index("parallel") < lines.index("wandb")


def test_yaml_loads_as_equal_settings(recipe):
    functions = [RewardFunction("m:f", arguments={"a": [1, 2.5, None, {"b": "1e-6"}]}), RewardFunction("f.py:g", "on", -0.5, "x")]
    settings = settings_of("actor.path=a", "actor.optim.lr=1e-6", "rollout.top_k=5", "data.train=[a, b]", "actor.dual_clip=null")
    settings = replace(settings, reward=Reward(functions=functions))
    assert settings_of("--config", recipe(to_yaml(settings))) == settings


NASTY = ["1e-6", "on", "null", "~", "12:30", "2026-01-01", "010", "0x10", "1_000", ".5", "-", ""]
NASTY += [" x ", "a: b", "#", "é\n", "[a", "<<", "="]


@pytest.mark.parametrize("text", NASTY)
def test_strings_come_back_as_they_were(recipe, text):
    settings = replace(Settings(), wandb=Wandb(name=text, tags=[text, text]))
    assert settings_of("--config", recipe(to_yaml(settings))) == settings


@hypothesis_settings(max_examples=30, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.text(st.characters(codec="utf-8")), st.integers(-(2**62), 2**62))
def test_any_value_comes_back(tmp_path_factory, number, text, seed):
    actor = replace(Settings().actor, entropy_coef=number)
    settings = replace(Settings(), actor=actor, trainer=Trainer(seed=seed, output_dir=text))
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(to_yaml(settings), encoding="utf-8", newline="")
    assert settings_of("--config", str(path)) == settings


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_project_loads(path):
    assert settings_of("--config", str(path)) != Settings()


# ---- the files that settings name


@pytest.fixture
def files(tmp_path):
    """A model directory, an empty directory and a data file."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl").write_text("")
    return tmp_path


def test_files_that_exist_pass(files):
    model, rows = files / "model", files / "rows.jsonl"
    roles = [f"{role}.path={model}" for role in ("actor", "critic", "reference", "reward_model", "supervised")]
    data = [f"data.{kind}=[{rows}]" for kind in ("train", "validation", "ptx")]
    for program in ("train", "sft", "reward_model"):
        check_files(settings_of(*roles, *data), program)
        check_files(Settings(), program)  # names none


@pytest.mark.parametrize(
    "program, key",
    [("train", f"{role}.path") for role in ("actor", "critic", "reference", "reward_model")]
    + [("sft", "supervised.path"), ("reward_model", "supervised.path")],
)
def test_model_directory_that_is_none(files, program, key):
    for name, fault in (("none", "is not a directory"), ("rows.jsonl", "is not a directory"), ("empty", "holds no config.json")):
        with pytest.raises(ConfigError) as caught:
            check_files(settings_of(f"{key}={files / name}"), program)
        assert str(caught.value).startswith(f"{key}: {files / name} {fault}")


@pytest.mark.parametrize("program, kinds", [("train", ["train", "validation", "ptx"]), ("sft", ["train", "validation"])])
def test_data_files_that_are_missing_come_at_once(files, program, kinds):
    overrides = [f"data.{kind}=[{files / 'rows.jsonl'}, {files / kind}]" for kind in ("train", "validation", "ptx")]
    with pytest.raises(ConfigError) as caught:
        check_files(settings_of(*overrides), program)
    lines = str(caught.value).split("\n  ")[1:]
    assert [line.split(" is not a file")[0] for line in lines] == [f"data.{kind}.1: {files / kind}" for kind in kinds]


def test_files_of_the_other_program_do_not_matter(files):
    check_files(settings_of("actor.path=none", "data.ptx=[none]"), "sft")
    check_files(settings_of("supervised.path=none"), "train")


def test_heads_alone_read_prompts_and_the_actor_only(files):
    free = ["data.validation=[none]", "data.ptx=[none]", "critic.path=none", "reference.path=none", "reward_model.path=none"]
    check_files(settings_of("trainer.mode=heads", *free), "heads")
    for override in ("actor.path=none", "data.train=[none]"):
        with pytest.raises(ConfigError, match=f"{override.partition('=')[0]}.*: none is not a"):
            check_files(settings_of("trainer.mode=heads", *free, override), "heads")


def update_of(files: Path, *overrides: str) -> Settings:
    """trainer.mode=update, from the rollouts of iterations 0 and 1."""
    for iteration in (0, 1):
        (files / f"00000{iteration}.jsonl").write_text("")
    models = [f"actor.path={files / 'model'}", f"critic.path={files / 'model'}"]
    return settings_of("trainer.mode=update", f"rollout.replay_dir={files}", *models, *overrides)


def test_an_update_needs_the_files_that_it_reads_only(files):
    free = ["data.train=[none]", "data.validation=[none]", "reference.path=none", "reward_model.path=none"]
    check_files(update_of(files, "trainer.iterations=2", *free), "train")
    for override in ("actor.path=none", "critic.path=none", "data.ptx=[none]"):
        with pytest.raises(ConfigError, match=f"{override.partition('=')[0]}.*: none is not a"):
            check_files(update_of(files, "trainer.iterations=2", override), "train")
    with pytest.raises(ConfigError, match="reward_model.path: none is not a directory"):
        check_files(update_of(files, "trainer.iterations=2", "critic.path=null", "reward_model.path=none"), "train")


def test_the_first_iteration_without_rollouts_is_named(files):
    with pytest.raises(ConfigError) as caught:
        check_files(update_of(files, "trainer.iterations=4"), "train")
    message = str(caught.value)
    assert message.startswith(f"rollout.replay_dir: {files} ") and "has no 000002.jsonl, the rollouts of iteration 2 of" in message
    assert "trainer.iterations 4; set trainer.iterations=2, or make them by a run with rollout.dump=true" in message
    with pytest.raises(ConfigError, match="has no 000000.jsonl.*; make them by a run"):
        check_files(update_of(files, "trainer.iterations=4", "rollout.replay_dir=none"), "train")

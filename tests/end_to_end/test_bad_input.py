"""Bad input gets a clear error, on all ranks, in seconds, and leaves nothing behind.

What is wrong with the input shows before the ranks join; these messages are collected in one process. Launches on 2 ranks
then show what a user sees of an error that all ranks have, that only one has, and that shows when the ranks have joined.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end.job import ROOT, Job, start
from end_to_end.task import Task, written
from rollout_files import experiences

from rlhf_mc.config import ConfigError
from rlhf_mc.launch import refuse_foreign_apex
from rlhf_mc.recipe import load_settings
from rlhf_mc.rollout_files import conditions

BROKEN_FUNCTION = "import a_module_that_nobody_has\n\ndef reward(sample):\n    return 1.0\n"

# name of the case -> what its message must hold: key or file, the wrong value, the fix
MESSAGES = {
    "no_such_model": ["actor.path: /no/such/model is not a directory", "name a local Hugging Face directory"],
    "no_config": ["critic.path:", "holds no config.json"],
    "unsupported_architecture": ["actor.path:", "architecture GPT2LMHeadModel is not supported", "LlamaForCausalLM"],
    "unsupported_reward_model": ["reward_model.path:", "architecture BertForSequenceClassification is not supported"],
    "no_model_of_its_family": ["'", "hidden size (128) is not a multiple of the number of attention heads (3)"],
    "other_vocabulary": ["the vocabularies of actor.path (15 tokens) and critic.path (15 tokens) differ, first at id 8: '3' against '4'"],
    "heads_by_tensor_parallel": ["parallel.tensor=2 does not divide the 3 attention heads of actor.path"],
    "layers_by_pipeline": ["parallel.pipeline=2 does not divide the 3 layers of actor.path"],
    "layers_by_chunks": ["parallel.virtual_pipeline=3 does not divide the 1 layers of actor.path on each of 2 pipeline stages"],
    "heads_by_engine": ["rollout.tensor_parallel: 2 does not divide the 3 attention heads"],
    "indivisible_ranks": ["parallel: 2 ranks cannot be divided", "tensor 3", "start a multiple of 3 ranks"],
    "no_such_file": ["data.train.0: /no/such/prompts.jsonl is not a file"],
    "empty_data": ["data.train: '", "empty.jsonl' has no rows"],
    "row_without_field": ["half_fieldless.jsonl:2: the row needs", "it has sentence"],
    "corrupt_line": ["corrupt.jsonl:2: the line is not JSON"],
    "long_prompts": ["nothing is left to use: 64 prompts, 64 dropped as longer than data.max_prompt_tokens=4", "the shortest has 8"],
    "text_without_field": ["fieldless.jsonl:1: the row needs"],
    "reward_function_does_not_import": ["reward.functions:", "broken.py:reward' cannot be used", "No module named 'a_module_that_nobody_has'"],
    "no_such_reward_function": ["reward.functions:", "rlhf_mc.rewards.builtin:nothing' cannot be used"],
    "small_kv_cache": ["rollout.kv_cache_gib: 1e-06 GiB on each rank cannot hold one sequence of 24 tokens", "set it to"],
    "longer_than_model": ["data.max_prompt_tokens + rollout.max_tokens = 4016 exceeds the 256 positions"],
    "no_stop_token": ["no eos_token_id in generation_config.json, config.json or the tokenizer"],
    "unknown_key": ["actor.lr: no such key; did you mean actor.optim.lr?"],
    "wrong_type": ['trainer.iterations: "many" is str; expected int'],
    "no_rollouts": ["rollout.replay_dir: ", "has no 000000.jsonl, the rollouts of iteration 0 of trainer.iterations 3; make them by a run"],
    "other_rollouts": ["rollout.samples_per_prompt: 2, but ", "000000.jsonl was made with 4; set rollout.samples_per_prompt=4"],
    "nothing_pays": ["pay nothing; name a reward model or a reward function"],
}  # fmt: skip


def changed_model(task: Task, name: str, **config: object) -> str:
    """A copy of the Llama's directory without weights, with `config` on top of its config.json; None takes a key out."""
    path = task.directory / name
    path.mkdir()
    for file in Path(task.model("llama")).glob("*.json"):
        (path / file.name).write_text(file.read_text())
    fields = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    return str(path)


def with_other_vocabulary(task: Task) -> str:
    """A model whose tokenizer has two tokens the other way round."""
    path = Path(changed_model(task, "vocabulary"))
    text = (path / "tokenizer.json").read_text()
    three, four = ('"3": 8', '"4": 9')
    assert three in text and four in text
    (path / "tokenizer.json").write_text(text.replace(three, '"3": 9').replace(four, '"4": 8'))
    return str(path)


def without_stop_token(task: Task) -> str:
    """A model that nothing tells when to stop."""
    path = Path(changed_model(task, "stopless", eos_token_id=None))
    (path / "generation_config.json").unlink(missing_ok=True)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if k != "eos_token"}))
    return str(path)


def update_from(directory: Path) -> dict[str, str]:
    """What makes a run one that trains from the rollouts there."""
    return {"trainer.mode": "update", "rollout.replay_dir": str(directory)}


def rollouts_of_four_samples(task: Task) -> Path:
    """The directory of a file that was made with 4 samples of each prompt."""
    settings, _ = load_settings(written(task.overrides(task.directory / "never") | {"rollout.samples_per_prompt": "4"}))
    return experiences.written(task.directory / "rollouts" / "000000.jsonl", settings=conditions(settings)).parent


def wrong_overrides(task: Task) -> dict[str, dict[str, str]]:
    """For each case, what makes the task's settings wrong."""
    (task.directory / "empty.jsonl").write_text("\n")
    (task.directory / "corrupt.jsonl").write_text('{"prompt": "sort 1"}\n{"prompt": "sort 2"\n')
    (task.directory / "fieldless.jsonl").write_text('{"sentence": "sort 1"}\n')
    (task.directory / "half_fieldless.jsonl").write_text('{"prompt": "sort 1"}\n{"sentence": "sort 2"}\n')
    (task.directory / "broken.py").write_text(BROKEN_FUNCTION)
    (task.directory / "no_model").mkdir()
    odd = changed_model(task, "odd", hidden_size=96, num_attention_heads=3, num_key_value_heads=3, num_hidden_layers=3)
    files = {name: f"[{task.directory}/{name}.jsonl]" for name in ("empty", "corrupt", "fieldless", "half_fieldless")}
    return {
        "no_such_model": {"actor.path": "/no/such/model"},
        "no_config": {"critic.path": f"{task.directory}/no_model"},
        "unsupported_architecture": {"actor.path": changed_model(task, "gpt2", architectures=["GPT2LMHeadModel"])},
        "unsupported_reward_model": {
            "reward_model.path": changed_model(task, "bert", architectures=["BertForSequenceClassification"])
        },
        "no_model_of_its_family": {"actor.path": changed_model(task, "three", num_attention_heads=3)},
        "other_vocabulary": {"critic.path": with_other_vocabulary(task)},
        "heads_by_tensor_parallel": {"actor.path": odd, "parallel.tensor": "2"},
        "layers_by_pipeline": {"actor.path": odd, "parallel.pipeline": "2"},
        "layers_by_chunks": {"parallel.pipeline": "2", "parallel.virtual_pipeline": "3"},
        "heads_by_engine": {"actor.path": odd, "parallel.tensor": "2", "rollout.tensor_parallel": "2"},
        "indivisible_ranks": {"parallel.tensor": "3"},
        "no_such_file": {"data.train": "[/no/such/prompts.jsonl]"},
        "empty_data": {"data.train": files["empty"]},
        "row_without_field": {"data.train": files["half_fieldless"]},
        "corrupt_line": {"data.train": files["corrupt"]},
        "long_prompts": {"data.max_prompt_tokens": "4"},
        "text_without_field": {"data.ptx": files["fieldless"], "actor.ptx_coef": "1"},
        "reward_function_does_not_import": {"reward.functions": f'[{{path: "{task.directory}/broken.py:reward"}}]'},
        "no_such_reward_function": {"reward.functions": '[{path: "rlhf_mc.rewards.builtin:nothing"}]'},
        "small_kv_cache": {"rollout.kv_cache_gib": "1e-6"},
        "longer_than_model": {"rollout.max_tokens": "4000"},
        "no_stop_token": dict.fromkeys(("actor.path", "reward_model.path"), without_stop_token(task)),
        "unknown_key": {"actor.lr": "1"},
        "wrong_type": {"trainer.iterations": "many"},
        "no_rollouts": update_from(task.directory),
        "other_rollouts": update_from(rollouts_of_four_samples(task)) | {"trainer.iterations": "1"},
        "nothing_pays": {"reward_model.weight": "0"},
    }


@pytest.fixture(scope="module")
def messages(task, ranks) -> dict[str, str]:
    """The message of every case."""
    good = task.overrides(task.directory / "never")
    cases = {name: written(good | wrong) for name, wrong in wrong_overrides(task).items()}
    (found,) = ranks.run("end_to_end.refusals:refusals", cases=cases)
    assert not (task.directory / "never").exists()
    return found


@pytest.mark.parametrize("case", MESSAGES)
def test_the_message_names_what_is_wrong_and_the_fix(case, messages):
    assert all(part in messages[case] for part in MESSAGES[case]), messages[case]


# ---- a package named apex


def foreign_apex(directory: Path) -> Path:
    (directory / "apex").mkdir()
    (directory / "apex" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    return directory


def test_a_foreign_apex_ends_the_program_with_status_2_before_anything_heavy(task, tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "rlhf_mc.train", *written(task.overrides(tmp_path / "out"))]
    environment = os.environ | {"PYTHONPATH": str(foreign_apex(tmp_path))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert f"apex ({tmp_path}/apex/__init__.py) is not NVIDIA's" in lines[-1] and "pip uninstall apex" in lines[-1]
    assert not [line for line in lines if line.endswith((" torch", " transformers", " vllm"))]
    assert not (tmp_path / "out").exists()


def test_an_apex_with_optimizers_is_accepted_without_being_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(foreign_apex(tmp_path)))
    with pytest.raises(ConfigError):
        refuse_foreign_apex()
    (tmp_path / "apex" / "optimizers").mkdir()
    refuse_foreign_apex()


# ---- launches on 2 ranks


def failed(job: Job, message: str) -> None:
    """The job ended because of a ConfigError that was read once, and left nothing."""
    assert job.wait(200) != 0
    assert job.output.count("rlhf_mc: train: ") == 1 == job.output.count(message), job.output
    assert "exitcode  : 2" in job.output, "torchrun reports the status of the first rank that ended"
    assert "launch.py" not in job.output, "a traceback through the program says nothing to the user"
    job.seconds_until_gone(10)
    assert job.left_in_shared_memory() == []


@pytest.mark.slow
def test_an_error_that_all_ranks_have_is_read_once(task, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN_FUNCTION)
    settings = task.overrides(tmp_path / "out") | {"reward.functions": f'[{{path: "{tmp_path}/broken.py:reward"}}]'}
    failed(start(tmp_path / "log", "rlhf_mc.train", written(settings)), "No module named 'a_module_that_nobody_has'")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_too_little_memory_for_the_engine_shows_before_models_are_built(task, tmp_path):
    settings = task.overrides(tmp_path / "out") | {"rollout.kv_cache_gib": "1e6"}
    failed(start(tmp_path / "log", "rlhf_mc.train", written(settings)), "rank 0: 2 x rollout.kv_cache_gib = 2e+06 GiB")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_rank_without_its_file_ends_all_with_its_message(task, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    settings = task.overrides(tmp_path / "out") | {"data.train": f"[{os.path.relpath(task.data, ROOT)}/prompts.jsonl]"}
    environment = {"RANK_1_RUNS_IN": str(tmp_path / "elsewhere")}
    job = start(tmp_path / "log", "tests.end_to_end.rank_without_file", written(settings), environment=environment)
    failed(job, f"prompts.jsonl is not a file (from {tmp_path}/elsewhere)")
    assert not (tmp_path / "out").exists()

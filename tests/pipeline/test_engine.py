"""The real engine under torchrun, against transformers: TP1 with 2 replicas, TP2, and a run on 4 ranks of which one is killed.

vLLM takes long to import: three launches are made, once each, and the tests judge what their ranks recorded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pipeline.test_seeded_draws import chi_square
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from rlhf_mc.config import ConfigError
from rlhf_mc.pipeline.engine_limits import stop_token_ids

RANKS = Path(__file__).with_name("engine_ranks.py")
SIZES = dict(
    vocab_size=300, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, max_position_embeddings=512, eos_token_id=2, initializer_range=0.05,
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    exit_code: int
    log: str
    ranks: list[dict]


def launch(directory: Path, model: PretrainedConfig, spec: dict) -> Launch:
    """Run engine_ranks.py on the ranks of the training grid with a random model of these sizes."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(model).save_pretrained(directory / "model")
    spec |= {"model": str(directory / "model"), "out": str(directory)}
    (directory / "spec.json").write_text(json.dumps(spec))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(spec["training_tensor"])]
    command = [*torchrun, str(RANKS), str(directory / "spec.json")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})
    records = sorted(directory.glob("rank*.json"))
    assert len(records) == spec["training_tensor"], process.stderr
    return Launch(process.returncode, process.stderr, [json.loads(file.read_text()) for file in records])


@pytest.fixture(scope="module")
def replicas(tmp_path_factory) -> Launch:
    """Two replicas of an untied Llama, fp32, temperature 0.7, in an engine that does not repack weights."""
    model = LlamaConfig(**SIZES, tie_word_embeddings=False)
    spec = dict(
        training_tensor=2, tensor=1, repacks=False, dtype="fp32", temperature=0.7, kv_cache_gib=0.01,
        bad_update="missing", end="closed", heads="shared",
    )  # fmt: skip
    return launch(tmp_path_factory.mktemp("replicas"), model, spec)


@pytest.fixture(scope="module")
def tensor_parallel(tmp_path_factory) -> Launch:
    """One tied Qwen2 over two ranks, fp32, temperature 1, with a KV cache for little more than one sequence."""
    model = Qwen2Config(**SIZES, tie_word_embeddings=True)
    spec = dict(
        training_tensor=2, tensor=2, repacks=True, dtype="fp32", temperature=1.0, kv_cache_gib=0.0001,
        bad_update="twice", end="closed", heads="own",
    )  # fmt: skip
    return launch(tmp_path_factory.mktemp("tensor"), model, spec)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Launch:
    """Two replicas of a tied Qwen3, each over two ranks at an interval, bf16; in the end rank 1 dies by SIGKILL."""
    model = Qwen3Config(**SIZES, tie_word_embeddings=True)
    spec = dict(
        training_tensor=4, tensor=2, repacks=True, dtype="bf16", temperature=1.0, kv_cache_gib=0.01,
        bad_update="missing", end="killed", heads=None,
    )  # fmt: skip
    return launch(tmp_path_factory.mktemp("killed"), model, spec)


@pytest.fixture(params=["replicas", "tensor_parallel"])
def fp32_run(request) -> Launch:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["replicas", "tensor_parallel", "killed"])
def any_run(request) -> Launch:
    return request.getfixturevalue(request.param)


def test_logprobs_equal_transformers_after_every_load(fp32_run):
    for rank in fp32_run.ranks:
        assert len(rank["after_load"]) == 3
        assert all(difference["max"] < 1e-5 for difference in rank["after_load"])
        assert rank["greedy"]["max"] < 1e-5
        assert rank["against_old_weights"]["max"] > 0.1, "the weights changed too little to prove anything"


def test_bf16_weights_arrive(killed):
    for rank in killed.ranks:
        assert all(difference["mean"] < 0.02 for difference in rank["after_load"])
        assert rank["against_old_weights"]["mean"] > 5 * rank["after_load"][-1]["mean"]


def test_weights_are_written_in_place_unless_the_engine_repacked_them(replicas, tensor_parallel, killed):
    assert [rank["writes_in_place"] for run in (replicas, tensor_parallel, killed) for rank in run.ranks] == [True] * 2 + [False] * 6


def test_replicas_lie_at_intervals_where_rollout_tp_is_smaller(killed):
    assert [rank["replica_ranks"] for rank in killed.ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    token_ids = [token_ids for token_ids, _, _ in killed.ranks[0]["completions"]]
    assert len({tuple(ids) for ids in token_ids}) == len(token_ids)


def test_stop_tokens_are_excluded_before_min_tokens_and_the_rest_is_renormalised(fp32_run):
    for rank in fp32_run.ranks:
        assert rank["without_mask"]["max"] > 1e-3
        for token_ids, _, _ in rank["completions"]:
            assert len(token_ids) >= 5 and not set(token_ids[:5]) & set(range(2, 14))


def test_the_stop_token_is_kept_and_only_there(any_run):
    completions = any_run.ranks[0]["completions"]
    assert {reason for _, reason, _ in completions} == {"stop", "length"}
    for token_ids, reason, stop_token in completions:
        stops = [position for position, token in enumerate(token_ids) if token in range(2, 14)]
        if reason == "stop":
            assert stops == [len(token_ids) - 1] and stop_token == token_ids[-1]
        else:
            assert stops == [] and stop_token is None and len(token_ids) == 24


def test_samples_do_not_depend_on_the_number_of_replicas(replicas):
    token_ids = [token_ids for token_ids, _, _ in replicas.ranks[0]["completions"]]
    for rank in replicas.ranks:
        assert rank["as_other_replicas"] == [token_ids] * 3
    assert len({tuple(ids) for ids in token_ids}) == len(token_ids), "samples of one prompt must differ"


def test_stepping_gives_the_same_samples_as_they_finish(fp32_run):
    token_ids = [token_ids for token_ids, _, _ in fp32_run.ranks[0]["completions"]]
    for rank in fp32_run.ranks:
        stepwise = rank["stepwise"]
        assert stepwise["running"][0] == 24 and stepwise["running"] == sorted(stepwise["running"], reverse=True)
        assert len(stepwise["token_ids"]) in (22, 23, 24)  # the last step may finish several
        assert all(token_ids[int(number)] == ids for number, ids in stepwise["token_ids"].items())
        assert "24 earlier requests are not finished" in stepwise["refused"]
        assert stepwise["after_abort"] == [0, 0]


def test_drafts_change_no_sample_and_no_logprob(fp32_run):
    """Sampling and greedy, drafts of any number, that number changing; good heads and stale ones."""
    for rank in fp32_run.ranks:
        for run in rank["drafted"]["runs"]:
            assert run["same"], run["name"]
            assert run["difference"] < 1e-5, run["name"]


def test_accepted_drafts_save_steps(fp32_run):
    for rank in fp32_run.ranks:
        runs = {run["name"]: run for run in rank["drafted"]["runs"]}
        assert set(runs["one"]["checked"]) == {0, 1} and set(runs["changing"]["checked"]) == {0, 1, 2, 3}
        assert runs["all"]["checked"] == [0] + [3] * (len(runs["all"]["checked"]) - 1)
        assert not runs["all"]["decodes_only"][0] and sum(runs["all"]["decodes_only"]) > 20
        assert runs["greedy"]["accepted"] > 20, "heads that repeat the next token must be right sometimes"
        for run in runs.values():
            assert run["running"] == run["emitted"] - run["accepted"]  # drafts that are right past the end are none of them
        assert runs["greedy"]["running"] < runs["greedy"]["emitted"]


def test_new_heads_draft_otherwise(fp32_run):
    for rank in fp32_run.ranks:
        runs = {run["name"]: run for run in rank["drafted"]["runs"]}
        assert runs["stale"]["accepted"] < runs["greedy"]["accepted"] / 2


def test_samples_under_drafts_have_the_targets_distribution(replicas):
    """The second token, the first that is drafted, against transformers' exact distribution."""
    counts = torch.bincount(torch.tensor(sum((rank["drafted"]["second_tokens"] for rank in replicas.ranks), [])), minlength=300)
    expected = torch.tensor(replicas.ranks[0]["drafted"]["distribution"], dtype=torch.float64) * counts.sum()
    assert counts.sum() > 2000
    assert chi_square(counts, expected) < 5


def test_more_drafts_than_heads_are_refused(fp32_run):
    assert all("4 drafted tokens: the engine has 3 draft heads" in rank["drafted"]["too_many"] for rank in fp32_run.ranks)


def test_logprobs_of_a_given_sequence_equal_transformers(fp32_run):
    for rank in fp32_run.ranks:
        assert rank["probe"] < 1e-5


def test_every_rank_gets_the_whole_rollout(any_run):
    first, *others = any_run.ranks
    for other in others:
        assert first["completions"] == other["completions"]
        assert first["logprobs_of_batch"] == other["logprobs_of_batch"]
    assert len(first["logprobs_of_batch"]) == sum(len(token_ids) for token_ids, _, _ in first["completions"])


def test_replicas_share_the_work(replicas):
    hands = [rank["hand"] for rank in replicas.ranks]
    assert sorted(sum(hands, [])) == list(range(24)) and {len(hand) for hand in hands} == {12}


def test_wrong_settings_are_refused_on_every_rank(any_run):
    for rank in any_run.ranks:
        refused = rank["refused_settings"]
        assert refused["kv_cache_over_host"].startswith(f"ConfigError: rank 0: {len(any_run.ranks)} x rollout.kv_cache_gib")
        assert "are free" in refused["kv_cache_over_host"]
        assert refused["kv_cache_under_one_sequence"].startswith("ConfigError: rollout.kv_cache_gib: 1e-06 GiB")
        assert "cannot hold one sequence of 36 tokens" in refused["kv_cache_under_one_sequence"]
        assert "set it to 0.001 or more" in refused["kv_cache_under_one_sequence"]
        assert refused["longer_than_model"].startswith("ConfigError: data.max_prompt_tokens + rollout.max_tokens = 4108 exceeds")


def test_wrong_requests_are_refused(any_run):
    for rank in any_run.ranks:
        assert "no weights yet" in rank["before_first_load"]
        refused = rank["refused_requests"]
        assert "holds weights 3, not 2" in refused["other_version"]
        assert "data.max_prompt_tokens = 12" in refused["long_prompt"]
        assert "outside the vocabulary of 300" in refused["foreign_token"]
        assert "lost them in sleep" in refused["after_sleep"]
        assert "wake_kv_cache" in refused["kv_cache_asleep"]
        assert refused["awake"] == ""
        assert refused["empty"] == "[]"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("replicas", "weight update 4: 38400 elements of this rank's shard were not sent"),
        ("tensor_parallel", "elements of this rank's shard were not sent, or sent twice"),
    ],
)
def test_wrong_weights_are_refused_and_end_the_engine(run, message, request):
    for rank in request.getfixturevalue(run).ranks:
        refused = rank["refused_updates"]
        assert message in refused["update"]
        assert "no weights yet" in refused["generate_after"]
        assert "start the run again" in refused["update_after"]


def test_an_error_in_a_step_leaves_no_request_behind(any_run):
    for rank in any_run.ranks:
        refused = rank["refused_requests"]
        assert refused["out_of_memory"] == "no memory for the activations"
        assert (refused["left_by_it"], refused["same_afterwards"]) == ("0", "True")
        assert "log-probs are not finite" in refused["poisoned"]
        assert refused["left"] == "0"


def test_the_process_is_left_as_it_was(any_run):
    assert all(kept for rank in any_run.ranks for kept in rank["kept"].values())


def test_closed_runs_exit_with_0(fp32_run):
    assert fp32_run.exit_code == 0, fp32_run.log


def test_no_shared_memory_is_left(tensor_parallel, killed):
    assert killed.exit_code != 0
    for run in (tensor_parallel, killed):
        mapped = {name for rank in run.ranks for name in rank["shared_memory"]}
        assert any("cpushm" in name for name in mapped), "the engine used no shared memory: this test would prove nothing"
        assert not [name for name in mapped if Path("/dev/shm", name).exists()]


def test_stop_tokens_come_from_the_model_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert stop_token_ids(str(tmp_path)) == [2]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert stop_token_ids(str(tmp_path), tokenizer_eos_id=9) == [5, 7, 9]


def test_a_model_without_a_stop_token_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    with pytest.raises(ConfigError, match="no eos_token_id"):
        stop_token_ids(str(tmp_path))

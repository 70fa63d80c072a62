"""Whole PPO runs on 2 ranks, megatron-core and vLLM in the same processes: what must hold in every iteration, on every layout.

Each launch takes some 20 seconds, so each is made once, and the tests judge what it wrote. That the engine's log-probs stay
within 1e-5 of megatron's in all of them also shows that vLLM stays exact in a process where megatron runs on the CPU.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from end_to_end import plain_vllm
from end_to_end.job import start
from end_to_end.task import Task, written
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf_mc.config import Medusa
from rlhf_mc.medusa.files import check_heads, load_heads
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.hf_config import read_shape
from rlhf_mc.rollout_files import read_rollout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# One update an iteration, through the very micro-batches that scored: then old and new log-probs are the same bits.
ONE_UPDATE = ("tensor_parallel", "pipeline", "context_parallel")
ALL = (*ONE_UPDATE, "data_parallel")
# What two runs of the same numbers may differ in.
_OF_THE_MACHINE = ("timing_s/", "perf/", "memory_gib/", "offload/", "pipeline/", "rollout/", "straggler/")
# What drafts change: what is measured of them, and last bits of the engine's log-probs, which only metrics read.
_OF_DRAFTS = ("medusa/", "sync/", "training/rollout_logprobs", "val/")


@dataclass(frozen=True)
class Run:
    """What a finished run left: its directory, its iterations, its output, and the model that it started from."""

    directory: Path
    metrics: list[dict[str, float]]
    output: str
    actor: str

    @property
    def samples(self) -> list[dict]:
        """The rows of samples.jsonl."""
        return [json.loads(line) for line in (self.directory / "samples.jsonl").read_text().splitlines()]


def run(task: Task, name: str, family: str, **overrides: str) -> Run:
    """One launch, with `overrides` (section__key) on the task's settings."""
    directory = task.directory / name
    settings = task.overrides(directory, family) | {key.replace("__", "."): value for key, value in overrides.items()}
    job = start(task.directory / f"{name}.log", "rlhf_mc.train", written(settings))
    assert job.wait(500) == 0, job.output
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return Run(directory, metrics, job.output, settings["actor.path"])


@pytest.fixture(scope="module")
def tensor_parallel(task) -> Run:
    """A tied Qwen3 with draft heads that use its output layer, TP2 for training, two engines of one rank each."""
    two = dict(medusa__enabled="true", medusa__drafted_tokens="2", parallel__tensor="2", rollout__tensor_parallel="1")
    return run(task, "tensor_parallel", "qwen3", wandb__mode="offline", trainer__evaluate_every="2", **two)


@pytest.fixture(scope="module")
def pipeline(task) -> Run:
    """An untied Qwen2, two chunks on each of two pipeline stages, sampled with TP2; two frozen draft heads with output layers of their own,
    always in use.
    """
    models = dict(actor__path=task.model("qwen2", num_layers=4), reward_model__path=task.model("llama", value_head=True, num_layers=4))
    stages = dict(parallel__pipeline="2", parallel__virtual_pipeline="2")
    heads = dict(medusa__enabled="true", medusa__num_heads="2", medusa__shared_output="false", medusa__drafted_tokens="2", medusa__train="false")
    return run(task, "pipeline", "qwen2", rollout__tensor_parallel="2", **models, **stages, **heads)


@pytest.fixture(scope="module")
def context_parallel(task) -> Run:
    """A tied Llama whose sequences are shared by two ranks, with trained draft heads; two engines of one rank each."""
    return run(task, "context_parallel", "llama", medusa__enabled="true", parallel__context="2", critic__path=task.model("llama"))


# Chunks of whichever samples finish first, scored between the engine's steps: six small passes of each role, in two orders of roles.
IN_CHUNKS = dict(
    pipeline__chunks="6", pipeline__chunk_by="finished", pipeline__score_while_generating="true", pipeline__steps_per_exchange="2",
)  # fmt: skip


def everything(task: Task, name: str, **overrides: str) -> Run:
    """An untied Mistral on two data-parallel ranks, with whatever PPO can be asked for beside the plain case."""
    text = task.directory / "text.jsonl"
    text.write_text("".join(f'{{"text": "sort {i % 10} {i % 7} {i % 3} ="}}\n' for i in range(40)))
    function = '{path: "rlhf_mc.rewards.builtin:regex_match", name: has_one, weight: 2.0, arguments: {pattern: "1"}}'
    return run(
        task, name, "mistral",
        rollout__temperature="0.7", rollout__min_tokens="2", actor__entropy_coef="0.01", algorithm__epochs="2",
        algorithm__mini_batch_sequences="8", algorithm__kl="{use: loss, estimator: k3, coef: 0.1}", actor__ptx_coef="0.5",
        data__ptx=f"[{text}]", reward__functions=f"[{function}]", reward_model__weight="0.5",
        reward__truncated="penalise", reward__truncation_penalty="-0.5",
        actor__micro_batch="{tokens: 40, sequences: null}", **IN_CHUNKS, **overrides,
    )  # fmt: skip


@pytest.fixture(scope="module")
def data_parallel(task) -> Run:
    return everything(task, "data_parallel", medusa__enabled="true", medusa__steps="3", medusa__step_tokens="100")


@pytest.fixture(scope="module")
def plain(task) -> Run:
    """The same without draft heads, one thing after the other, with every role on the device all the time."""
    return everything(task, "plain", pipeline__mode="serial", offload__enabled="false")


@pytest.fixture
def any_run(request) -> Run:
    return request.getfixturevalue(request.param)


def every(*names: str):
    return pytest.mark.parametrize("any_run", names, indirect=True)


@every(*ALL)
def test_engine_and_megatron_agree_on_every_token_after_every_sync(any_run):
    assert [line["iteration"] for line in any_run.metrics] == [0, 1, 2]
    assert all(0 < line["training/rollout_logprobs_diff_max"] < 1e-5 for line in any_run.metrics)
    moved = [abs(line["actor/reward_kl_penalty"]) for line in any_run.metrics[1:]]
    assert min(moved) > 1e-3, "the actor moved too little for a sync that was left out to show"


@every(*ALL)
def test_kl_to_the_reference_is_zero_before_the_first_update(any_run):
    assert any_run.metrics[0]["actor/reward_kl_penalty"] == 0.0


@every(*ONE_UPDATE)
def test_kl_is_zero_for_each_single_sequence_before_the_first_update(any_run):
    first, later = any_run.metrics[0], any_run.metrics[1]
    spread = ("mean", "max", "min")
    assert [first[f"critic/rewards/{k}"] for k in spread] == [first[f"critic/score/{k}"] for k in spread]
    assert [later[f"critic/rewards/{k}"] for k in spread] != [later[f"critic/score/{k}"] for k in spread]


@every(*ONE_UPDATE)
def test_the_first_update_has_ratio_one(any_run):
    for line in any_run.metrics:
        assert (line["actor/ratio"], line["actor/ppo_kl"], line["actor/pg_clipfrac"]) == (1.0, 0.0, 0.0)


def test_later_updates_of_an_iteration_have_another_ratio(data_parallel):
    for line in data_parallel.metrics:
        assert line["actor/ratio"] != 1.0 and line["actor/ppo_kl"] != 0.0


@every(*ALL)
def test_every_number_is_finite_and_the_models_learn(any_run):
    for line in any_run.metrics:
        assert "nonfinite" not in line
        assert all(math.isfinite(value) for value in line.values())
        assert line["actor/grad_norm"] > 0 and line["critic/grad_norm"] > 0 and line["actor/entropy"] > 0


@every(*ALL)
def test_offload_moves_the_minimum(any_run):
    for line in any_run.metrics:
        assert line["offload/to_host_gib"] + line["offload/to_device_gib"] == line["offload/minimum_gib"] > 0


def test_without_offload_nothing_moves(plain):
    assert all(line["offload/to_host_gib"] == line["offload/to_device_gib"] == 0 for line in plain.metrics)


def numbers(of: Run) -> list[dict[str, float]]:
    return [{name: x for name, x in line.items() if not name.startswith((*_OF_THE_MACHINE, *_OF_DRAFTS))} for line in of.metrics]


def assert_same_run(first: Run, second: Run) -> None:
    """The same metrics, samples and models, bit for bit."""
    assert len(numbers(first)[0]) > 30 and numbers(first) == numbers(second)
    assert first.samples == second.samples
    for role in ("actor", "critic"):
        ours, theirs = (load_file(of.directory / role / "model.safetensors") for of in (first, second))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_neither_the_pipeline_nor_offload_nor_draft_heads_change_a_bit(data_parallel, plain):
    """Though chunks were scored while later ones were still being decoded, and by the roles in another order; and heads were trained."""
    assert sum(line["medusa/drafted_tokens"] for line in data_parallel.metrics) > 0
    assert all(line["medusa/grad_norm"] > 0 for line in data_parallel.metrics)
    assert_same_run(data_parallel, plain)
    trace = json.loads((data_parallel.directory / "trace" / "rank0.json").read_text())["traceEvents"]
    assert any(steps_after_a_score(trace, whole) for whole in trace if whole["name"] == "make_experience")


def steps_after_a_score(trace: list[dict], whole: dict) -> bool:
    """Whether, inside the event `whole`, the engine made a step after a role had begun to score."""
    inside = [event for event in trace if whole["ts"] <= event.get("ts", 0) < whole["ts"] + whole["dur"]]
    first_score = min(event["ts"] for event in inside if event["name"].startswith("score/"))
    return any(event["name"] == "step" and event["ts"] > first_score for event in inside)


def test_scores_are_the_weighted_sum_of_reward_model_and_functions(data_parallel):
    for row in data_parallel.samples:
        parts = row["parts"]
        assert parts["has_one"] == float("1" in row["response"])
        penalty = 0.5 if row["finish_reason"] == "length" else 0.0
        assert row["score"] == pytest.approx(0.5 * parts["reward_model"] + 2.0 * parts["has_one"] - penalty, abs=1e-6)
    assert {row["parts"]["has_one"] for row in data_parallel.samples} == {0.0, 1.0}


def test_kl_loss_pretraining_text_and_shortest_length_take_part(data_parallel):
    for line in data_parallel.metrics:
        assert line["actor/kl_loss"] > 0 and line["actor/ptx_loss"] > 0
        assert line["response_length/min"] >= 2
        # With KL as a loss, the rewards are the scores alone.
        assert line["critic/rewards/mean"] == pytest.approx(line["critic/score/mean"], abs=1e-6)
    losses = [line["actor/ptx_loss"] for line in data_parallel.metrics]
    assert losses[-1] < losses[0]


def test_without_a_critic_samples_are_judged_by_their_neighbours(task):
    group = dict(algorithm__advantages="rloo", algorithm__kl="{use: loss, estimator: k3, coef: 0.1}", rollout__samples_per_prompt="4")
    alone = run(task, "alone", "llama", **group, trainer__iterations="2", trainer__save_every="2", rollout__dump="true")
    for line in alone.metrics:
        assert line["offload/to_host_gib"] + line["offload/to_device_gib"] == line["offload/minimum_gib"] > 0
        assert line["actor/grad_norm"] > 0 and "critic/grad_norm" not in line and "timing_s/score/critic" not in line
        assert line["critic/values/max"] == line["critic/values/min"] == 0
    _, experience = read_rollout(alone.directory / "rollouts" / "000001.jsonl")
    lengths = experience.rollout.response_lengths
    scores = experience.scores.view(-1, 4).double()
    expected = (scores - (scores.sum(1, keepdim=True) - scores) / 3).view(-1).repeat_interleave(lengths)
    torch.testing.assert_close(experience.advantages.double(), expected, rtol=0, atol=1e-6)
    assert expected.abs().max() > 0.01
    assert not (alone.directory / "critic").exists() and "results are in" in alone.output
    assert not list((alone.directory / "checkpoints/000002").glob("*critic*"))


@every("tensor_parallel", "pipeline")
def test_the_trained_models_load_in_transformers(any_run):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    for role, kind in (("actor", AutoModelForCausalLM), ("critic", AutoModelForSequenceClassification)):
        model, report = kind.from_pretrained(any_run.directory / role, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
        assert torch.isfinite(model(torch.tensor([[1, 3, 5]])).logits).all()
        assert len(AutoTokenizer.from_pretrained(any_run.directory / role)) == model.config.vocab_size
    before, after = (load_file(Path(path, "model.safetensors")) for path in (any_run.actor, any_run.directory / "actor"))
    assert before.keys() == after.keys() and all(not torch.equal(before[name], after[name]) for name in before)


@every("tensor_parallel", "data_parallel", "context_parallel")
def test_draft_heads_learn_and_are_saved_for_the_engine(any_run):
    model = read_shape(any_run.actor)
    heads = HeadsShape.of(Medusa(), model)
    check_heads(any_run.directory / "medusa", Medusa(), model)
    assert all(tensor.any() for tensor in load_heads(any_run.directory / "medusa", heads).values()), "blocks start from zero"
    for line in any_run.metrics:
        assert {f"medusa/head_{k}/{what}" for k in (1, 2, 3) for what in ("loss", "accuracy")} <= line.keys()
        assert 0 <= line["medusa/steps_drafting"] <= 1 and line["medusa/tokens_per_forward"] >= 1


@torch.no_grad()
def test_the_saved_heads_serve_in_vllm_as_it_is(tensor_parallel, tmp_path):
    actor, heads = tensor_parallel.directory / "actor", tensor_parallel.directory / "medusa"
    out = tmp_path / "record.json"
    done = subprocess.run([sys.executable, plain_vllm.__file__, str(actor), str(heads), str(out)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    model = AutoModelForCausalLM.from_pretrained(actor)
    for prompt, found, logprobs in zip(plain_vllm.PROMPTS, record["token_ids"], record["logprobs"], strict=True):
        sequence, expected = list(prompt), []
        for _ in range(plain_vllm.MAX_TOKENS):
            greedy = model(torch.tensor([sequence])).logits[0, -1].log_softmax(-1).max(-1)
            sequence.append(int(greedy.indices))
            expected.append(float(greedy.values))
        assert found == sequence[len(prompt) :]
        assert logprobs == pytest.approx(expected, abs=1e-5)
    assert record["counts"]["vllm:spec_decode_num_draft_tokens"] > 0
    saved = load_file(heads / "model.safetensors")
    for name in HeadsShape.of(Medusa(), read_shape(actor)).block_names:
        sums = [float(saved[name].double().sum()), float(saved[name].double().square().sum())]
        assert record["weights"][name] == pytest.approx(sums, rel=1e-9), "vLLM's own loader read other weights"


def test_frozen_heads_draft_and_stay(pipeline):
    assert all(line["medusa/drafted_tokens"] > 0 and "medusa/loss" not in line for line in pipeline.metrics)
    blocks = load_heads(pipeline.directory / "medusa", HeadsShape(2, 1, False, 0, 0))
    assert not any(tensor.any() for name, tensor in blocks.items() if name.startswith("blocks."))


def test_the_run_is_written_down(tensor_parallel):
    directory = tensor_parallel.directory
    rows = json.loads((directory / "summary.json").read_text())["rows"]
    assert {row["label"] for row in rows} == {"reward_model", "response_length", "draft_acceptance", "tokens_per_forward", "draft_speedup"}
    measured = [row for row in rows if row["label"] != "draft_speedup"]  # unknown where every step drafts
    assert all(row["change"] == pytest.approx(row["after"] - row["before"]) for row in measured)
    assert [line["iteration"] for line in tensor_parallel.metrics if "val/reward_model" in line] == [1]
    assert [row["iteration"] for row in tensor_parallel.samples] == [0] * 8 + [1] * 8 + [2] * 8
    (run_file,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    assert run_file.stat().st_size > 1000
    assert (directory / "wandb_run_id").read_text().strip() in run_file.name


def test_every_rank_leaves_a_trace_of_its_last_iterations(tensor_parallel):
    for rank in (0, 1):
        events = json.loads((tensor_parallel.directory / "trace" / f"rank{rank}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        named = Counter((event["cat"], event["name"]) for event in events if event["ph"] == "X")
        assert named["main", "generate"] == named["main", "update_actor"] == 2 and named["main", "save"] == 2
        assert named["main", "wait/rewards"] >= 2
        assert named["copies/out", "copy actor optimizer"] and named["copies/in", "copy actor optimizer"]


def test_the_kv_cache_wakes_when_the_trainer_has_left_and_no_step_comes_before(tensor_parallel):
    """On a shared GPU each takes what the one before it gave back; on CPU only the trace can tell."""
    events = json.loads((tensor_parallel.directory / "trace" / "rank0.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    syncs = [span for span in spans if span["name"] == "sync_weights"]
    left_in_all = []
    for sync in syncs:
        end = sync["ts"] + sync["dur"]
        inside = [span for span in spans if sync["ts"] <= span["ts"] < end]
        starts = {span["name"]: span["ts"] for span in inside if span["cat"] == "engine"}
        assert sorted(starts, key=starts.__getitem__) == ["sleep", "wake weights", "new weights", "wake KV cache"]
        left = [span["ts"] + span["dur"] for span in inside if span["cat"] == "copies/out"]
        assert all(time <= starts["wake KV cache"] for time in left)
        left_in_all += left
        steps = [span["ts"] for span in spans if span["name"] == "step" and span["ts"] >= sync["ts"]]
        assert min(steps) >= end
    assert len(syncs) >= 2 and left_in_all, "an actor that was updated leaves in its next sync"


def test_rank_0_tells_the_story_in_order(tensor_parallel):
    told = (
        "64 prompts", "2 ranks on cpu, fp32", "engine: starting vLLM", "prompt  ", "  iter ", "bytes moved by offload", "states of roles",
        "Held-out prompts, greedy", "peak of host memory", "results are in",
    )  # fmt: skip
    places = [tensor_parallel.output.find(text) for text in told]
    assert -1 not in places and places == sorted(places)

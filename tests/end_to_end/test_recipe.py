"""The tiny recipe as a user starts it, cut short: task, SFT, reward model and PPO by one command, and what it leaves.

How much it learns at full length is in docs/; here it takes a few steps of each part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end.job import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHORT = [
    "supervised.max_steps=4", "trainer.iterations=2", "critic.warmup_iterations=0", "data.prompts_per_iteration=64",
    "rollout.samples_per_prompt=2", "algorithm.mini_batch_sequences=128", "wandb.mode=offline",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """The directory of the results, and what was printed."""
    if not Path(sys.prefix, ".rlhf_mc_stamp").is_file():
        pytest.skip("the recipe would install its environment: start the tests with scripts/run_tests.sh, which has made it")
    run = tmp_path_factory.mktemp("recipe")
    environment = os.environ | {"RUN_DIR": str(run), "RLHF_MC_VENV": sys.prefix}
    command = ["bash", "scripts/run_ppo_tiny.sh", *SHORT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return run, done.stdout


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_part_takes_its_steps_and_measures_them(finished):
    run, _ = finished
    for part in ("sft", "reward_model"):
        steps = lines_of(run / part / "metrics.jsonl")
        assert [step["iteration"] for step in steps] == [0, 1, 2, 3]
        assert all(step["train/grad_norm"] > 0 and "nonfinite" not in step for step in steps)
    assert lines_of(run / "sft" / "metrics.jsonl")[-1]["train/loss"] < lines_of(run / "sft" / "metrics.jsonl")[0]["train/loss"]
    heads = {f"medusa_head_{k}_accuracy" for k in (1, 2, 3)}
    assert {"loss"} | heads <= {row["label"] for row in json.loads((run / "sft" / "summary.json").read_text())["rows"]}
    assert all(step["train/medusa/loss"] > 0 and step["train/medusa/grad_norm"] > 0 for step in lines_of(run / "sft" / "metrics.jsonl"))
    labels = {row["label"] for row in json.loads((run / "reward_model" / "summary.json").read_text())["rows"]}
    assert "accuracy" in labels


def test_each_part_starts_from_the_one_before(finished):
    run, _ = finished
    settings = (run / "ppo" / "config.yaml").read_text()
    assert f"path: {run}/sft/model" in settings and f"path: {run}/reward_model/model" in settings
    assert f"path: {run}/sft/medusa" in settings
    for heads in ("sft/medusa", "ppo/medusa"):
        assert json.loads((run / heads / "config.json").read_text())["model_type"] == "medusa" and (run / heads / "model.safetensors").is_file()
    for model in ("sft/model", "reward_model/model", "ppo/actor", "ppo/critic"):
        assert (run / model / "model.safetensors").stat().st_size > 100_000
        assert (run / model / "tokenizer.json").is_file()
    assert json.loads((run / "reward_model/model/config.json").read_text())["num_labels"] == 1


def test_ppo_ends_with_the_table_of_before_and_after_and_the_place_of_the_results(finished):
    run, output = finished
    iterations = lines_of(run / "ppo" / "metrics.jsonl")
    assert [line["iteration"] for line in iterations] == [0, 1]
    assert all(line["training/rollout_logprobs_diff_max"] < 1e-5 for line in iterations)
    table = output[output.rindex("Held-out prompts, greedy") :]
    head, _, *rows = table.splitlines()[1:]
    assert head.split() == ["before", "after", "change"]
    summary = json.loads((run / "ppo" / "summary.json").read_text())["rows"]
    assert {"accuracy", "reward_model"} <= {row["label"] for row in summary}
    assert [row.split()[0] for row in rows[: len(summary)]] == [row["label"] for row in summary]
    assert all(0 <= row[when] <= 1 for row in summary if row["label"] == "accuracy" for when in ("before", "after"))
    assert f"results are in {run}/ppo" in table
    assert lines_of(run / "ppo" / "samples.jsonl") and list((run / "ppo").glob("wandb/offline-run-*/run-*.wandb"))

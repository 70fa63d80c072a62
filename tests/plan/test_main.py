"""The command line of plans: what it prints, its exit status, and that it needs no torch; and plans of dry runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from plan.cases import CONFIGS, SHAPES

from rlhf_mc import launch
from rlhf_mc.config import ConfigError
from rlhf_mc.main import main

ROOT = CONFIGS.parents[1]
WITHOUT_TORCH = """
import sys
for name in ("torch", "megatron", "vllm", "transformers"):
    sys.modules[name] = None
from rlhf_mc.main import main
sys.exit(main(sys.argv[1:]))
"""


def plan(*arguments: str) -> list[str]:
    """Arguments of rlhf-mc for the recipe of Llama 3 8B."""
    paths = [f"{role}.path={SHAPES / 'llama3_8b'}" for role in ("actor", "critic", "reward_model")]
    config = str(CONFIGS / "ppo_llama3_8b.yaml")
    return ["plan", "--config", config, "--gpus", "8", "--host-memory-gib", "1000", *arguments, *paths]


def test_the_plan_needs_no_torch_and_no_weights() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *plan("--search", "2")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "samples a second" in done.stdout


def test_the_picture(capsys: pytest.CaptureFixture) -> None:
    assert main(plan()) == 0
    text = capsys.readouterr().out
    bars = [line for line in text.splitlines() if line.startswith(("generate ", "train actor ")) and "GiB (" in line]
    assert len(bars) == 2 and all("E" in line for line in bars[:1]) and "OO" in bars[1]
    assert text.count("<- peak") == 1
    for words in ("host memory of a node", "weight sync, received", "samples a second", "assumed"):
        assert words in text


def test_json_says_the_same(capsys: pytest.CaptureFixture) -> None:
    assert main(plan("--json")) == 0
    found = json.loads(capsys.readouterr().out)
    totals = {(row.pop("stage"), row.pop("pipeline_stage")): sum(row.values()) for row in found["device_bytes"]}
    assert max(totals.values()) == found["peak"]["bytes"] == totals[found["peak"]["stage"], found["peak"]["pipeline_stage"]]
    assert found["shortages"] == [] and found["seconds"]["iteration"] > found["seconds"]["generate"] > 0


def test_exit_status(capsys: pytest.CaptureFixture) -> None:
    assert main(plan("--gpu-memory-gib", "24")) == 1
    assert "does not fit: device: train" in capsys.readouterr().err
    assert main(plan("--search", "1", "--gpu-memory-gib", "12")) == 1
    assert "nothing fits" in capsys.readouterr().out
    assert main(plan("parallel.tensor=3")) == 2
    assert "parallel: 8 ranks cannot be divided" in capsys.readouterr().err


def dry_run(tmp_path: Path, size: str, *overrides: str) -> list[str]:
    """Arguments of a training program for the recipe of Llama 3."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}\n")
    paths = [f"{role}.path={SHAPES / f'llama3_{size}'}" for role in ("actor", "critic", "reward_model")]
    config = str(CONFIGS / f"ppo_llama3_{size}.yaml")
    return ["--config", config, *paths, f"data.train=[{prompts}]", "--dry-run", *overrides]


def test_a_dry_run_prints_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr("rlhf_mc.offload.planned.available_host_bytes", lambda: 1000 << 30)
    assert launch._checked_settings("train", dry_run(tmp_path, "8b", "trainer.device=cuda")) is None
    text = capsys.readouterr().out
    assert "8 x h100" in text and "device memory by stage" in text and "are in order" in text


def test_a_dry_run_refuses_what_cannot_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"(?s)this run does not fit here.*host: a node takes.*train actor: params"):
        launch._checked_settings("train", dry_run(tmp_path, "8b", "trainer.device=cpu"))

"""Metrics of a rollout batch, against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rlhf_mc.batch import Experience, RolloutBatch
from rlhf_mc.tracking import rollout_metrics


def experience_of_two() -> Experience:
    """Sequences of 2 + 1 and 1 + 3 tokens; the second hit max_tokens and does not train."""
    rollout = RolloutBatch(
        tokens=torch.arange(7),
        prompt_lengths=torch.tensor([2, 1]),
        response_lengths=torch.tensor([1, 3]),
        rollout_logprobs=torch.tensor([-1.0, -2.0, -3.0, -4.0]),
        truncated=torch.tensor([False, True]),
        stop_reasons=["stop", "length"],
        groups=torch.tensor([0, 1]),
        rows=[{}, {}],
    )
    return Experience(
        rollout=rollout,
        old_logprobs=torch.tensor([-1.0, -2.0, -3.5, -4.0]),
        ref_logprobs=torch.tensor([-1.5, 0.0, 0.0, 0.0]),
        values=torch.tensor([0.5, 9.0, 9.0, 9.0]),
        scores=torch.tensor([1.0, -1.0]),
        rewards=torch.tensor([0.9, 0.1, 0.2, -1.5]),
        advantages=torch.tensor([2.0, 9.0, 9.0, 9.0]),
        returns=torch.tensor([3.0, 9.0, 9.0, 9.0]),
        loss_mask=torch.tensor([True, False, False, False]),
        reward_parts={"exact": torch.tensor([1.0, math.nan]), "nowhere": torch.tensor([math.nan, math.nan])},
    )


def test_rollout_metrics_under_verl_names() -> None:
    metrics = rollout_metrics(experience_of_two())
    expected = {
        "critic/score/mean": 0.0, "critic/score/max": 1.0, "critic/score/min": -1.0,
        "critic/rewards/mean": (0.9 - 1.2) / 2, "critic/rewards/min": -1.2, "critic/rewards/max": 0.9,
        "critic/advantages/mean": 2.0, "critic/returns/mean": 3.0, "critic/values/mean": 0.5,
        "reward/exact/mean": 1.0, "actor/reward_kl_penalty": 0.5,
        "response_length/mean": 2.0, "response_length/max": 3.0, "response_length/min": 1.0, "response_length/clip_ratio": 0.5,
        "prompt_length/mean": 1.5,
        "training/rollout_logprobs_diff_max": 0.5, "training/rollout_logprobs_diff_mean": 0.125,
        "training/rollout_probs_diff_max": math.exp(-3.0) - math.exp(-3.5),
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert "reward/nowhere/mean" not in metrics and "critic/vf_explained_var" not in metrics


def test_explained_variance_of_the_values() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    experience = replace(experience_of_two(), loss_mask=torch.ones(4, dtype=torch.bool), returns=returns)
    perfect = rollout_metrics(replace(experience, values=experience.returns))
    useless = rollout_metrics(replace(experience, values=torch.zeros(4)))
    assert (perfect["critic/vf_explained_var"], useless["critic/vf_explained_var"]) == (1.0, 0.0)


def test_a_batch_that_trains_no_token_still_has_metrics() -> None:
    metrics = rollout_metrics(replace(experience_of_two(), loss_mask=torch.zeros(4, dtype=torch.bool)))
    assert metrics["critic/score/mean"] == 0.0 and "critic/advantages/mean" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())

"""Mixing against a plain loop, and its properties."""

from dataclasses import replace
from math import isnan, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mc.config import ConfigError, Reward, RewardFunction
from rlhf_mc.rewards.interface import RewardError
from rlhf_mc.rewards.mix import mix_rewards
from rlhf_mc.rewards.pool import FunctionResult, RewardResults
from rlhf_mc.rewards.process import Outcome

NUMBERS = st.floats(-10, 10, width=32)


@st.composite
def batches(draw):
    """(results, response_lengths, truncated, model_scores) with every kind of outcome."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    functions = []
    for f in range(draw(st.integers(0, 3))):
        outcomes = [draw(st.sampled_from(Outcome)) for _ in lengths]
        per_token = [outcome is Outcome.SCORED and draw(st.booleans()) for outcome in outcomes]
        tokens = [draw(st.lists(NUMBERS, min_size=n, max_size=n)) if wanted else None for n, wanted in zip(lengths, per_token)]
        values = [sum(t) if t is not None else draw(NUMBERS) if o is Outcome.SCORED else nan for t, o in zip(tokens, outcomes)]
        function = RewardFunction(path=f"m:f{f}", weight=draw(st.sampled_from([0.0, 1.0, -0.5])))
        functions.append(FunctionResult(function, values, tokens, outcomes))
    model_scores = torch.tensor([draw(NUMBERS) for _ in lengths])
    truncated = torch.tensor([draw(st.booleans()) for _ in lengths])
    return RewardResults(functions, [None] * len(lengths)), torch.tensor(lengths), truncated, model_scores


def by_plain_loop(results, lengths, truncated, reward, model_scores, model_weight):
    scores, tokens, mask = [], [], []
    for b, length in enumerate(lengths.tolist()):
        score, extra, keep = model_weight * float(model_scores[b]), [0.0] * length, True
        for result in results.functions:
            weight = result.function.weight
            if weight and result.outcomes[b] in (Outcome.ERROR, Outcome.TIMEOUT):
                keep = False
            if weight and result.outcomes[b] is Outcome.SCORED:
                if result.token_values[b] is None:
                    score += weight * result.values[b]
                else:
                    extra = [x + weight * y for x, y in zip(extra, result.token_values[b])]
        if truncated[b] and reward.truncated == "penalise":
            score += reward.truncation_penalty
        if truncated[b] and reward.truncated == "mask":
            keep = False
        scores.append(score), tokens.extend(extra), mask.append(keep)
    return torch.tensor(scores), torch.tensor(tokens), torch.tensor(mask)


@settings(deadline=None, max_examples=200)
@given(batches(), st.sampled_from(["score", "penalise", "mask"]), st.sampled_from([0.0, 1.0, 0.3]))
def test_mixing_equals_a_plain_loop(batch, truncated_policy, model_weight):
    results, lengths, truncated, model_scores = batch
    reward = Reward(truncated=truncated_policy, truncation_penalty=-2.0)
    mixed = mix_rewards(results, lengths, truncated, reward, model_scores, model_weight)
    scores, tokens, mask = by_plain_loop(results, lengths, truncated, reward, model_scores, model_weight)
    assert mixed.scores.dtype == torch.float32 and mixed.loss_mask.dtype == torch.bool
    torch.testing.assert_close(mixed.scores, scores, atol=1e-4, rtol=1e-5)
    extras = torch.zeros(len(tokens)) if mixed.token_rewards is None else mixed.token_rewards
    torch.testing.assert_close(extras, tokens, atol=1e-4, rtol=1e-5)
    assert mixed.loss_mask.tolist() == mask.tolist()
    assert mixed.parts["reward_model"].tolist() == model_scores.tolist()
    assert mixed.parts.keys() == {"reward_model", *(r.function.label for r in results.functions)}


@settings(deadline=None, max_examples=50)
@given(batches())
def test_what_is_only_measured_changes_nothing(batch):
    """Functions of weight 0 are in the parts, and neither pay nor mask."""
    results, lengths, truncated, model_scores = batch
    free = [replace(r, function=RewardFunction(path=r.function.path, weight=0.0)) for r in results.functions]
    mixed = mix_rewards(RewardResults(free, results.data_sources), lengths, truncated, Reward(), model_scores)
    assert mixed.scores.tolist() == model_scores.tolist() and mixed.token_rewards is None and bool(mixed.loss_mask.all())
    for result in free:
        part = mixed.parts[result.function.label].tolist()
        assert [isnan(x) for x in part] == [isnan(x) for x in result.values]


def results_of(values: list[float], outcomes: list[Outcome], sources: list[str | None], **settings) -> RewardResults:
    function = RewardFunction(path="m:f", **settings)
    return RewardResults([FunctionResult(function, values, [None] * len(values), outcomes)], sources)


def test_a_failed_sample_is_masked_and_not_scored_zero_by_the_failed_function():
    results = results_of([nan, 2.0], [Outcome.TIMEOUT, Outcome.SCORED], [None, None])
    mixed = mix_rewards(results, torch.tensor([1, 1]), torch.tensor([False, False]), Reward())
    assert mixed.loss_mask.tolist() == [False, True]
    assert isnan(mixed.parts["f"][0]) and mixed.scores.isfinite().all() and mixed.scores[1] == 2.0


def test_a_row_that_nothing_pays_for_is_an_error():
    results = results_of([1.0, nan], [Outcome.SCORED, Outcome.NOT_APPLICABLE], ["math", "poems"], data_source="math")
    with pytest.raises(RewardError, match="nothing pays for a row with data_source 'poems'.*for data_source math"):
        mix_rewards(results, torch.tensor([1, 1]), torch.tensor([False, False]), Reward())
    mixed = mix_rewards(results, torch.tensor([1, 1]), torch.tensor([False, False]), Reward(), torch.tensor([0.5, 0.25]))
    assert mixed.scores.tolist() == [1.5, 0.25] and mixed.loss_mask.all()


def test_a_function_may_not_take_the_reward_models_name():
    with pytest.raises(ConfigError, match="the name reward_model is the reward model's"):
        Reward(functions=[RewardFunction(path="m:reward_model")]).check("reward")

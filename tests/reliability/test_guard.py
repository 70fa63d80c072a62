"""The guard's judgements, and its counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf_mc.batch import Experience, RolloutBatch
from rlhf_mc.config import Guard as Bounds
from rlhf_mc.reliability import BadUpdateError, Guard, fault_of_experience, fault_of_norm, fault_of_sums

NAN, INF = float("nan"), float("inf")


def experience() -> Experience:
    """Two sequences, of 2 and 3 response tokens, of which the last does not train."""
    rollout = RolloutBatch(
        tokens=torch.arange(7),
        prompt_lengths=torch.tensor([1, 1]),
        response_lengths=torch.tensor([2, 3]),
        truncated=torch.tensor([False, False]),
        stop_reasons=["stop", "stop"],
        groups=torch.tensor([0, 1]),
        rows=[{}, {}],
        rollout_logprobs=torch.zeros(5),
    )
    numbers = {name: torch.zeros(5) for name in ("old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")}
    mask = torch.tensor([True, True, True, True, False])
    return Experience(rollout=rollout, scores=torch.tensor([1.0, -2.0]), loss_mask=mask, reward_parts={"f": torch.tensor([1.0, NAN])}, **numbers)


def with_number(name: str, place: int, number: float) -> Experience:
    made = experience()
    values = getattr(made, name).clone()
    values[place] = number
    return replace(made, **{name: values})


def test_what_counts_in_the_loss_must_be_finite() -> None:
    assert fault_of_experience(experience(), Bounds()) is None
    for name in ("old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns"):
        for number in (NAN, INF, -INF):
            assert fault_of_experience(with_number(name, 2, number), Bounds()) == f"{name} of 1 tokens are not finite, in samples 1"
            assert fault_of_experience(with_number(name, 4, number), Bounds()) is None, "a masked token does not train"


@pytest.mark.parametrize("score", [NAN, INF, 2e4, -2e4])
def test_a_score_beyond_the_bound_is_named_with_its_parts(score: float) -> None:
    fault = fault_of_experience(with_number("scores", 0, score), Bounds(max_score=1e4))
    assert fault.startswith(f"the score of sample 0 is {score:.6g}, beyond guard.max_score 10000: {{'f': 1.0}}")
    made = with_number("scores", 0, score)
    assert fault_of_experience(replace(made, loss_mask=torch.tensor([False] * 2 + [True] * 3)), Bounds()) is None


def test_sums_and_norms() -> None:
    bounds = Bounds(max_ratio=3.0)
    assert fault_of_sums({"pg_loss": 1.0, "ratio": 30.0}, 10, bounds) is None
    assert fault_of_sums({"pg_loss": 1.0, "ratio": 31.0}, 10, bounds) == "the mean ratio is 3.1, beyond guard.max_ratio 3"
    assert fault_of_sums({"vf_loss": NAN}, 10, bounds) == "vf_loss is nan"
    assert [fault_of_norm(5.0), fault_of_norm(5.0, 6.0)] == [None, None]
    assert fault_of_norm(INF) == "the gradient norm is inf" and "beyond guard.max_grad_norm 4" in fault_of_norm(5.0, 4.0)


def test_the_run_stops_after_so_many_in_a_row_of_one_model() -> None:
    guard = Guard(Bounds(max_bad_updates=3))
    assert [guard.judged("the actor", fault) for fault in ("x", "x", None, "x")] == [True, True, False, True]
    assert guard.metrics() == {"guard/skipped_updates": 3.0, "guard/skipped_in_a_row": 1.0}
    assert guard.judged("the critic", "x") and guard.judged("the actor", "x")
    assert guard.metrics() == {"guard/skipped_updates": 2.0, "guard/skipped_in_a_row": 2.0}
    with pytest.raises(BadUpdateError, match="3 updates of the actor in a row were bad and skipped.*the last one: y"):
        guard.judged("the actor", "y")

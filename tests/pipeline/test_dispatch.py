"""Seeds, dealing, requests and the assembly of rollouts; no engine and no process group."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mc.batch import PromptBatch
from rlhf_mc.config import Rollout
from rlhf_mc.pipeline.dispatch import Completion, ResponseLengths, assemble_rollout, deal, requests_for, sample_seed


def batch_of(*prompts: list[int]) -> PromptBatch:
    tokens = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64)
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
    return PromptBatch(tokens, lengths, [{"i": i} for i in range(len(prompts))], torch.arange(len(prompts)))


COMPLETIONS = {
    2: Completion([4, 4, 2], [-0.1, -0.2, -0.3], "stop", 2),
    0: Completion([1, 2], [-0.5, -1.0], "stop", 2),
    3: Completion([], [], "length", None),
    1: Completion([3], [-2.0], "length", None),
}


def test_seeds_differ_in_the_bits_that_torch_keeps():
    seeds = {sample_seed(run, iteration, sample) for run in range(3) for iteration in range(20) for sample in range(64)}
    assert len(seeds) == 3 * 20 * 64
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)


def test_a_seed_is_a_function_of_its_arguments():
    assert sample_seed(1, 2, 3) == sample_seed(1, 2, 3)
    assert sample_seed(1, 23, 4) != sample_seed(12, 3, 4)
    assert sample_seed(1, 2, 3) == 1138364116778193076, "another hash: saved runs could not be sampled again"


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 5), st.integers(1, 7))
def test_dealing_gives_every_sample_once_in_order_and_equal_counts(lengths, samples_per_prompt, num_replicas):
    hands = deal(lengths, samples_per_prompt, num_replicas)
    assert len(hands) == num_replicas
    assert sorted(sample for hand in hands for sample in hand) == list(range(len(lengths) * samples_per_prompt))
    assert all(hand == sorted(hand) for hand in hands)
    assert max(map(len, hands)) - min(map(len, hands)) <= 1


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 7))
def test_dealing_spreads_prompt_tokens(lengths, samples_per_prompt, num_replicas):
    hands = deal(lengths, samples_per_prompt, num_replicas)
    loads = [sum(lengths[sample // samples_per_prompt] for sample in hand) for hand in hands]
    assert max(loads) - min(loads) <= max(lengths)


def test_dealing_goes_forth_and_back():
    assert deal([10, 9, 8, 7], 1, 2) == [[0, 3], [1, 2]]


def test_requests_are_in_the_order_of_the_rollout_with_seeds_of_their_own():
    rollout = Rollout(samples_per_prompt=2, max_tokens=9, min_tokens=4)
    requests = requests_for(batch_of([5, 6], [7]), rollout, run_seed=1, iteration=8)
    assert [request.prompt_ids for request in requests] == [[5, 6], [5, 6], [7], [7]]
    assert [request.seed for request in requests] == [sample_seed(1, 8, sample) for sample in range(4)]
    assert {(request.max_tokens, request.min_tokens) for request in requests} == {(9, 4)}


def test_a_rollout_holds_prompts_and_responses_in_order():
    rollout = assemble_rollout(batch_of([5, 6], [7]), 2, COMPLETIONS)
    assert [rollout.prompt(b) for b in range(4)] == [[5, 6], [5, 6], [7], [7]]
    assert [rollout.response(b) for b in range(4)] == [[1, 2], [3], [4, 4, 2], []]
    torch.testing.assert_close(rollout.rollout_logprobs, torch.tensor([-0.5, -1.0, -2.0, -0.1, -0.2, -0.3]))
    assert rollout.truncated.tolist() == [False, True, False, True]
    assert rollout.stop_reasons == ["stop", "length", "stop", "length"]
    assert rollout.groups.tolist() == [0, 0, 1, 1]
    assert rollout.rows == [{"i": 0}, {"i": 0}, {"i": 1}, {"i": 1}]


def test_a_part_of_a_rollout_holds_the_samples_asked_for():
    part = assemble_rollout(batch_of([5, 6], [7]), 2, COMPLETIONS, samples=[1, 2])
    assert [part.prompt(b) for b in range(2)] == [[5, 6], [7]] and [part.response(b) for b in range(2)] == [[3], [4, 4, 2]]
    assert part.groups.tolist() == [0, 1] and part.rows == [{"i": 0}, {"i": 1}]


def test_a_missing_completion_is_an_error():
    with pytest.raises(ValueError, match="1 of 2 samples have not come back, the first is 1"):
        assemble_rollout(batch_of([5], [6]), 1, {0: Completion([1], [-0.5], "length", None)})


def test_an_empty_batch_gives_an_empty_rollout():
    rollout = assemble_rollout(batch_of(), 2, {})
    assert len(rollout) == 0 and rollout.tokens.numel() == 0


def test_expected_lengths_are_those_of_the_last_time_a_prompt_was_sampled():
    lengths = ResponseLengths()
    first = batch_of([5, 6], [7])
    assert lengths.expected_tokens(first) == [2, 1]
    lengths.observe(assemble_rollout(first, 2, COMPLETIONS))
    # Responses of 2 and 1 tokens, then 3 and 0: 1.5 each on average, and so for a prompt that is new.
    assert lengths.expected_tokens(batch_of([7], [5, 6], [8, 8, 8])) == [2.5, 3.5, 4.5]
    lengths = ResponseLengths.from_state(json.loads(json.dumps(lengths.state())))
    lengths.observe(assemble_rollout(batch_of([7]), 2, {0: COMPLETIONS[0], 1: COMPLETIONS[2]}))
    assert lengths.expected_tokens(first) == [3.5, 3.5]

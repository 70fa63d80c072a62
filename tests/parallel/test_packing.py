"""What is asked of a model lies at the right rows, and its answers go to the right places."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_mc.batch import SequenceBatch
from rlhf_mc.config import MicroBatch
from rlhf_mc.parallel.context import Context
from rlhf_mc.parallel.microbatches import plan_microbatches
from rlhf_mc.parallel.packing import PackedBatch, PackedMicrobatch, RotaryTable

TABLE = RotaryTable(torch.arange(64.0)[:, None].repeat(1, 2), torch.zeros(64, 2))  # cos is the position itself


@st.composite
def batches(draw: st.DrawFn) -> SequenceBatch:
    """Token i of the batch has id 1000 + i, so that every token is known again; any tokens but the first are asked for."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=12))
    masks = [[False, *draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1))] for n in lengths]
    tokens = 1000 + torch.arange(sum(lengths))
    return SequenceBatch(tokens, torch.tensor(lengths), torch.tensor([m for mask in masks for m in mask]))


def packed(batch: SequenceBatch, asked: str, multiple: int, num_ranks: int = 1, num_context: int = 1) -> list[PackedMicrobatch]:
    """All micro-batches of all ranks, of which `num_context` share each."""
    plan = plan_microbatches(batch.lengths.tolist(), batch.lengths.tolist(), MicroBatch(tokens=16), num_ranks)
    whole = PackedBatch.of(batch, asked)
    places = [Context(num_context, rank) for rank in range(num_context)]
    return [whole.pack(planned, multiple, TABLE, torch.device("cpu"), place) for share in plan for planned in share for place in places]


def put_back(microbatches: list[PackedMicrobatch], values: list[Tensor], num_answers: int) -> Tensor:
    """values of each micro-batch's answers at their slots; each slot must be met once."""
    result, met = torch.full((num_answers,), -1), torch.zeros(num_answers, dtype=torch.int64)
    for microbatch, value in zip(microbatches, values):
        if not microbatch.fill:
            result[microbatch.slots] = value
            met[microbatch.slots] += 1
    assert (met == 1).all()
    return result


@given(batches(), st.integers(1, 4), st.integers(1, 3))
def test_each_asked_token_is_predicted_from_the_token_before_it(batch: SequenceBatch, multiple: int, num_ranks: int) -> None:
    microbatches = packed(batch, "predicted", multiple, num_ranks)
    asked_for = batch.tokens[batch.loss_mask]
    assert PackedBatch.of(batch, "predicted").num_answers == asked_for.numel()
    assert torch.equal(put_back(microbatches, [m.targets for m in microbatches], asked_for.numel()), asked_for)
    before = put_back(microbatches, [m.tokens[m.rows] for m in microbatches], asked_for.numel())
    assert torch.equal(before, asked_for - 1), "off by one"


@given(batches(), st.integers(1, 4), st.integers(1, 3))
def test_the_last_token_answers_for_its_sequence(batch: SequenceBatch, multiple: int, num_ranks: int) -> None:
    microbatches = packed(batch, "last", multiple, num_ranks)
    last = batch.tokens[batch.lengths.cumsum(0) - 1]
    assert torch.equal(put_back(microbatches, [m.tokens[m.rows] for m in microbatches], len(batch)), last)
    assert torch.equal(put_back(microbatches, [m.sequence_ids for m in microbatches], len(batch)), torch.arange(len(batch)))


@settings(max_examples=25)
@given(batches(), st.integers(1, 3), st.integers(1, 2), st.integers(2, 5))
def test_of_the_ranks_that_share_sequences_one_answers(batch: SequenceBatch, multiple: int, num_ranks: int, num_context: int) -> None:
    """Each number is known to one rank, which has the right row; and every rank knows what all are asked."""
    microbatches = packed(batch, "predicted", multiple, num_ranks, num_context)
    asked_for = batch.tokens[batch.loss_mask]
    assert torch.equal(put_back(microbatches, [m.targets for m in microbatches], asked_for.numel()), asked_for)
    before = put_back(microbatches, [m.tokens[m.rows] for m in microbatches], asked_for.numel())
    assert torch.equal(before, asked_for - 1), "off by one"
    last = packed(batch, "last", multiple, num_ranks, num_context)
    expected = batch.tokens[batch.lengths.cumsum(0) - 1]
    assert torch.equal(put_back(last, [m.tokens[m.rows] for m in last], len(batch)), expected)
    for first in range(0, len(microbatches), num_context):
        group = microbatches[first : first + num_context]
        assert len({m.tokens.numel() for m in group}) == 1 and group[0].tokens.numel() % multiple == 0
        assert sum((m.tokens > 0).sum() for m in group) > sum(m.tokens.numel() for m in group) - multiple * num_context
        for m in group:
            assert torch.equal(m.asked.targets, group[0].asked.targets) and torch.equal(m.asked.targets[m.mine], m.targets)


@given(batches())
def test_answers_know_their_sequence_and_their_number_in_it(batch: SequenceBatch) -> None:
    microbatches = packed(batch, "predicted", 1)
    sequence = torch.arange(len(batch)).repeat_interleave(batch.lengths)[batch.loss_mask]
    assert torch.equal(put_back(microbatches, [m.sequence_ids for m in microbatches], sequence.numel()), sequence)
    number = torch.tensor([int((sequence[:i] == s).sum()) for i, s in enumerate(sequence)], dtype=torch.int64)
    assert torch.equal(put_back(microbatches, [m.answer_numbers for m in microbatches], sequence.numel()), number)


@given(batches(), st.integers(1, 4))
def test_padding_is_a_sequence_of_its_own(batch: SequenceBatch, multiple: int) -> None:
    """No real token sees it, no answer is asked of it, and positions start again with each sequence."""
    for microbatch in packed(batch, "predicted", multiple):
        num_tokens = microbatch.tokens.numel()
        real = int((microbatch.tokens >= 1000).sum())
        assert num_tokens % multiple == 0 and num_tokens - real < multiple
        assert (microbatch.tokens[:real] >= 1000).all() and not microbatch.tokens[real:].any()
        assert microbatch.rows.numel() == 0 or int(microbatch.rows.max()) < real
        starts = microbatch.sequences.cu_seqlens_q.tolist()
        assert starts[-1] == num_tokens and (real == num_tokens or real in starts)
        expected = torch.cat([torch.arange(end - start) for start, end in zip(starts, starts[1:])])
        assert torch.equal(microbatch.sequences.cos[:, 0], expected.float())

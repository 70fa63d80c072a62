"""Which token each head is to predict at which row, in packed micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf_mc.batch import SequenceBatch
from rlhf_mc.medusa.loss import count_labels, head_labels, head_metrics
from rlhf_mc.parallel.microbatches import PlannedMicrobatch
from rlhf_mc.parallel.packing import PackedBatch, PackedMicrobatch, RotaryTable

NUM_HEADS = 3
TABLE = RotaryTable(torch.zeros(64, 2), torch.zeros(64, 2))


def batch_of(*sequences: tuple[list[int], list[bool]]) -> SequenceBatch:
    """From (tokens, loss mask) of each sequence."""
    return SequenceBatch(
        torch.tensor([token for tokens, _ in sequences for token in tokens]),
        torch.tensor([len(tokens) for tokens, _ in sequences]),
        torch.tensor([wanted for _, mask in sequences for wanted in mask], dtype=torch.bool),
    )


def packed(batch: SequenceBatch, *sequences: int, multiple: int = 1) -> PackedMicrobatch:
    """These sequences of the batch in one micro-batch."""
    return PackedBatch.of(batch, "predicted").pack(PlannedMicrobatch(sequences), multiple, TABLE, torch.device("cpu"))


def valid_tokens(tokens: Tensor, valid: Tensor) -> list[list[int | None]]:
    """By head and row, None where not valid."""
    return [[t if v else None for t, v in zip(*line)] for line in zip(tokens.tolist(), valid.tolist())]


def labels_of(microbatch: PackedMicrobatch) -> list[list[int | None]]:
    labels = head_labels(microbatch, NUM_HEADS)
    return valid_tokens(labels.tokens, labels.valid)


PROMPT = [False, False]
FIVE = ([10, 11, 12, 13, 14, 15, 16], PROMPT + [True] * 5)  # two tokens of prompt, five of response
TWO = ([20, 21, 22, 23], PROMPT + [True] * 2)
ONE = ([30, 31, 32], PROMPT + [True])


def test_head_k_predicts_the_token_k_places_after_the_rows_own_target() -> None:
    microbatch = packed(batch_of(FIVE), 0)
    assert microbatch.rows.tolist() == [1, 2, 3, 4, 5] and microbatch.targets.tolist() == [12, 13, 14, 15, 16]
    assert labels_of(microbatch) == [
        [13, 14, 15, 16, None],
        [14, 15, 16, None, None],
        [15, 16, None, None, None],
    ]


@pytest.mark.parametrize("multiple", [1, 8], ids=["exact", "padded"])
def test_labels_end_with_their_sequence(multiple: int) -> None:
    """Also where the next sequence is predicted from its second token on, and so has rows right behind."""
    continuation = ([40, 41, 42], [False, True, True])
    batch = batch_of(TWO, continuation, ONE, FIVE)
    expected = [
        [23, None] + [42, None] + [None] + [13, 14, 15, 16, None],
        [None, None] + [None, None] + [None] + [14, 15, 16, None, None],
        [None, None] + [None, None] + [None] + [15, 16, None, None, None],
    ]
    assert labels_of(packed(batch, 0, 1, 2, 3, multiple=multiple)) == expected


def test_tokens_outside_the_loss_mask_are_no_labels() -> None:
    """A conversation of two turns: what lies between them is not predicted, but what lies beyond it is."""
    turns = ([50, 51, 52, 53, 54, 55], [False, True, True, False, True, True])
    microbatch = packed(batch_of(turns), 0)
    assert microbatch.targets.tolist() == [51, 52, 54, 55]
    assert labels_of(microbatch) == [[52, None, 55, None], [None, 54, None, None], [54, 55, None, None]]


def test_a_micro_batch_may_have_nothing_to_predict() -> None:
    labels = head_labels(packed(batch_of(([1, 2], [False, False])), 0), NUM_HEADS)
    assert labels.tokens.shape == labels.valid.shape == (NUM_HEADS, 0)


def test_labels_are_counted_as_the_micro_batches_have_them() -> None:
    turns = ([50, 51, 52, 53, 54, 55], [False, True, True, False, True, True])
    batch = batch_of(TWO, turns, ONE, FIVE, ([1], [False]))
    parts = [packed(batch, 3, 0), packed(batch, 1), packed(batch, 4, 2)]
    counts = sum(head_labels(part, NUM_HEADS).valid.sum(dim=1) for part in parts)
    assert torch.equal(count_labels(batch, NUM_HEADS), counts)
    assert counts.tolist() == [1 + 2 + 4, 1 + 3, 2 + 2]


def test_metrics_are_means_over_each_heads_own_labels() -> None:
    first = {"medusa/head_1/loss": 6.0, "medusa/head_1/hits": 1.0, "medusa/head_1/count": 4.0}
    second = {"medusa/head_2/loss": 0.0, "medusa/head_2/hits": 0.0, "medusa/head_2/count": 0.0}
    third = {"medusa/head_3/loss": 4.0, "medusa/head_3/hits": 2.0, "medusa/head_3/count": 2.0}
    assert head_metrics(first | second | third, num_heads=3, decay=0.5) == {
        "medusa/head_1/loss": 1.5,
        "medusa/head_1/accuracy": 0.25,
        "medusa/head_2/loss": 0.0,
        "medusa/head_2/accuracy": 0.0,
        "medusa/head_3/loss": 2.0,
        "medusa/head_3/accuracy": 1.0,
        "medusa/loss": 1.5 + 0.25 * 2.0,
    }

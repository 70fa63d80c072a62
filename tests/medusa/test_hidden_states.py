"""What the scoring forward leaves for the heads: the wanted samples' rows, each on one data-parallel rank, shared out over tensor ranks."""

from __future__ import annotations

import pytest
import torch
from ranks import Layout, RankPool
from tiny_models import random_batch, sequences_of, tiny_language_model
from torch import Tensor

BATCH = random_batch([9, 13, 5, 20, 11, 1])
STEPS, MAX_ROWS, HIDDEN = [[4, 0], [5, 3]], 6, 32
NUM_ROWS = [8, 12, 4, 19, 10, 0]  # one fewer than tokens; the last sequence has nothing to predict


def rows_of(sample: int) -> Tensor:
    """The hidden states before each target, by transformers."""
    tokens, _ = sequences_of(BATCH)[sample]
    with torch.no_grad():
        return tiny_language_model("llama").model(tokens[None]).last_hidden_state[0, :-1]


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, data=2), Layout(tensor=2, pipeline=2, virtual=2)], ids=str)
def test_rows_and_labels_of_the_samples_in_steps(ranks: RankPool, language_model, layout: Layout) -> None:
    arguments = dict(directory=language_model("llama"), batch=BATCH, steps=STEPS, step_tokens=None, max_rows=MAX_ROWS)
    holders: list[int] = []
    for result in ranks.run("medusa.on_ranks:take", layout, **arguments):
        samples = result["samples"]
        holders += samples
        for number, (rows, tokens, valid) in samples.items():
            ahead = sequences_of(BATCH)[number][0]
            torch.testing.assert_close(rows, rows_of(number), rtol=0, atol=1e-5)
            for head in range(2):
                num_labels = len(ahead) - head - 2
                assert valid[head].tolist() == [row < num_labels for row in range(len(rows))]
                assert torch.equal(tokens[head][valid[head]], ahead[head + 2 :])
        num_rows = sum(NUM_ROWS[number] for number in samples)
        assert sum(result["sizes"]) == num_rows and all(size == MAX_ROWS for size in result["sizes"][:-1])
        assert result["num_bytes"] == num_rows * HIDDEN // layout.tensor * 4, "each tensor rank has its columns only"
        assert result["taken"] == [([4, 0], [16, 14]), ([3], [18, 17])]
        assert result["after clear"] == (0, [[], []])
    assert sorted(holders) == sorted([0, 3, 4] * layout.tensor), "on the tensor ranks of one data-parallel rank, last stage"


@pytest.mark.parametrize("layout", [Layout(context=2), Layout(context=4)], ids=str)
def test_context_ranks_share_the_rows_of_a_sample(ranks: RankPool, language_model, layout: Layout) -> None:
    """Each row once, with labels that may lie on another rank; what the limit cuts is what it cuts of whole samples."""
    steps = [[4, 2, 1, 0], [3, 5]]
    arguments = dict(directory=language_model("llama"), batch=BATCH, steps=steps, step_tokens=15, max_rows=MAX_ROWS)
    results = ranks.run("medusa.on_ranks:take", layout, **arguments)
    assert all(result["taken"] == [([4, 2], [9 + 3, 8 + 2]), ([3], [18, 17])] for result in results)
    for number in (2, 3, 4):
        parts = [result["samples"][number] for result in results if number in result["samples"]]
        rows, expected = torch.cat([rows for rows, _, _ in parts]), rows_of(number)
        found = torch.cdist(rows, expected).argmin(dim=1)
        assert torch.equal(found.sort().values, torch.arange(len(expected)))
        torch.testing.assert_close(rows, expected[found], rtol=0, atol=1e-5)
        ahead = sequences_of(BATCH)[number][0]
        tokens, valid = (torch.cat([part[i] for part in parts], dim=1) for i in (1, 2))
        for head in range(2):
            assert torch.equal(valid[head], found < len(ahead) - head - 2)
            assert torch.equal(tokens[head][valid[head]], ahead[found[valid[head]] + head + 2])


@pytest.mark.parametrize("layout", [Layout(), Layout(data=2)], ids=str)
def test_what_no_step_can_take_is_not_kept(ranks: RankPool, language_model, layout: Layout) -> None:
    """The limit cuts the same samples on every layout, and bounds what a rank holds."""
    steps, step_tokens = [[4, 2, 1, 0], [3, 5]], 15
    arguments = dict(directory=language_model("llama"), batch=BATCH, steps=steps, step_tokens=step_tokens, max_rows=MAX_ROWS)
    for result in ranks.run("medusa.on_ranks:take", layout, **arguments):
        assert result["taken"] == [([4, 2], [9 + 3, 8 + 2]), ([3], [18, 17])]
        assert sum(NUM_ROWS[number] for number in result["samples"] if number in steps[0]) <= step_tokens
        assert layout.data > 1 or sorted(result["samples"]) == [2, 3, 4]

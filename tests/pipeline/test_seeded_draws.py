"""Draws by seed and place: the distribution, the streams, the edges. Chi-square bounds at one in a million."""

from __future__ import annotations

import numpy
import pytest
import torch

from rlhf_mc.pipeline.seeded_draws import draw, likeliest, uniforms


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """In standard deviations of the statistic above its mean (Wilson and Hilferty's cube root)."""
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5


@pytest.mark.parametrize("vocab", [3, 256, 1000])
def test_draws_have_the_distribution(vocab: int) -> None:
    logprobs = (torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 1.5).log_softmax(0)
    count = 200 * vocab
    tokens = draw(logprobs.expand(count, vocab), uniforms(range(count), [7] * count))
    assert chi_square(torch.bincount(tokens, minlength=vocab), count * logprobs.exp()) < 5


def test_places_of_one_seed_are_independent_draws() -> None:
    count = 20_000
    u = uniforms([12345] * count, range(count))
    assert chi_square(torch.histc(u, 50, 0, 1).double(), torch.full((50,), count / 50)) < 5
    pairs = (u[:-1] * 8).long() * 8 + (u[1:] * 8).long()
    assert chi_square(torch.bincount(pairs, minlength=64).double(), torch.full((64,), (count - 1) / 64)) < 5


def test_the_stream_is_splitmix64() -> None:
    # The reference implementation's first outputs for seed 1234567 (Vigna, prng.di.unimi.it).
    reference = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    expected = [(value >> 12) * 2.0**-52 for value in reference]
    assert uniforms([1234567] * 3, range(3)).tolist() == expected


def test_a_token_without_probability_is_never_drawn() -> None:
    logprobs = torch.full((1, 600), -torch.inf)
    logprobs[0, [5, 300, 301]] = torch.tensor([0.2, 0.3, 0.5]).log()
    edges = torch.tensor([0.0, 0.2 - 1e-6, 0.2 + 1e-6, 0.5 - 1e-6, 0.5 + 1e-6, 1 - 2.0**-52], dtype=torch.float64)
    assert draw(logprobs.expand(len(edges), 600), edges).tolist() == [5, 5, 300, 300, 301, 301]


def test_rare_tokens_keep_their_probability() -> None:
    """A float32 running sum would lose what is smaller than 1e-7 of it."""
    logprobs = torch.full((1, 1000), -30.0)
    logprobs[0, 0] = 0.0
    inside = 1.0 + numpy.exp(-30.0) * 500.5
    total = 1.0 + numpy.exp(-30.0) * 999
    assert draw(logprobs, torch.tensor([inside / total], dtype=torch.float64)).item() == 501


def test_rows_of_nan_give_a_token_of_the_vocabulary() -> None:
    assert draw(torch.full((1, 300), torch.nan), torch.tensor([0.5], dtype=torch.float64)).item() < 300


@pytest.mark.parametrize("vocab", [1, 256, 1000])
def test_the_likeliest_is_the_first_of_the_largest(vocab: int) -> None:
    scores = torch.randint(0, 7, (50, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    scores[0] = -torch.inf
    first = (scores == scores.amax(1, keepdim=True)).int().argmax(1)
    assert torch.equal(likeliest(scores), first)

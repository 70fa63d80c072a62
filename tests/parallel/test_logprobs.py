"""Vocabulary-parallel log-probs, entropy and top-1 hits against plain autograd in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from ranks import Layout, RankPool
from torch import Tensor

from rlhf_mc.parallel import logits_chunk
from rlhf_mc.parallel.logprobs import Banned, TargetStatistics, vocabulary_parallel_logprobs

NUM_TOKENS, HIDDEN, VOCAB, TEMPERATURE = 5, 4, 7, 0.7


@pytest.fixture(scope="module")
def alone() -> Iterator[dist.ProcessGroup]:
    """The group of a world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def random_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [n, H], weight [V, H], targets [n]; the targets hold the first word, which is the likeliest, and the last."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.tensor([0, 6, 3, 3, 2])


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, banned: Banned | None = None) -> TargetStatistics:
    """The same by log_softmax over whole logits."""
    logits = hidden @ weight.T / TEMPERATURE
    if banned is not None:
        gone = torch.zeros_like(logits, dtype=torch.bool)
        gone[:, list(banned.tokens)] = banned.positions[:, None]
        logits = logits.masked_fill(gone, -1e30)
    all_logprobs = logits.log_softmax(-1)
    logprobs, entropy = all_logprobs.gather(1, targets[:, None]).squeeze(1), -(all_logprobs.exp() * all_logprobs).sum(-1)
    return TargetStatistics(logprobs, entropy, logits.argmax(-1) == targets)


def gradients(answers: TargetStatistics, *of: Tensor) -> tuple[Tensor, ...]:
    """Of a sum of log-probs and entropies, each with a slope of its own."""
    slopes = torch.arange(1.0, 2 * NUM_TOKENS + 1, dtype=answers[0].dtype).view(2, NUM_TOKENS)
    return torch.autograd.grad((slopes * torch.stack(answers[:2])).sum(), of)


BANNED = Banned(torch.tensor([True, False, True, True, False]), tokens=(1, 6))


@pytest.mark.parametrize("banned", [None, BANNED], ids=["all", "banned"])
def test_float64_equals_autograd(alone: dist.ProcessGroup, banned: Banned | None) -> None:
    hidden, weight, targets = random_inputs()
    ours = vocabulary_parallel_logprobs(hidden, weight, targets, 0, TEMPERATURE, alone, banned)
    theirs = reference(hidden, weight, targets, banned)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(ours, hidden, weight), gradients(theirs, hidden, weight), rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_finite_differences(alone: dist.ProcessGroup) -> None:
    hidden, weight, targets = random_inputs()
    assert torch.autograd.gradcheck(
        lambda h, w: vocabulary_parallel_logprobs(h, w, targets, 0, TEMPERATURE, alone)[:2], (hidden, weight)
    )


def test_float32_is_float64_rounded(alone: dist.ProcessGroup) -> None:
    hidden, weight, targets = random_inputs(torch.float32)
    ours = vocabulary_parallel_logprobs(hidden, weight, targets, 0, TEMPERATURE, alone)
    exact = reference(hidden.double(), weight.double(), targets)
    torch.testing.assert_close(torch.stack(ours[:2]).double(), torch.stack(exact[:2]), rtol=0, atol=2e-6)
    torch.testing.assert_close(gradients(ours, hidden, weight), gradients(exact, hidden, weight), rtol=1e-5, atol=1e-5)


def test_bf16_takes_the_softmax_in_float32(alone: dist.ProcessGroup) -> None:
    """Only the logits are rounded to bf16: what follows them adds no error of bf16's size."""
    hidden, weight, targets = random_inputs(torch.bfloat16)
    ours = vocabulary_parallel_logprobs(hidden, weight, targets, 0, 1.0, alone)
    exact = (hidden @ weight.T).double().log_softmax(-1)
    assert ours[0].dtype == ours[1].dtype == torch.float32
    torch.testing.assert_close(ours[0].double(), exact.gather(1, targets[:, None]).squeeze(1), rtol=0, atol=2e-6)
    torch.testing.assert_close(ours[1].double(), -(exact.exp() * exact).sum(-1), rtol=0, atol=2e-6)


@pytest.mark.parametrize("tokens_in_a_chunk", [1, 2, 5])
def test_chunks_change_nothing(alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, tokens_in_a_chunk: int) -> None:
    """Chunks of one token; of two, with a shorter last one; and one that ends exactly with the batch."""
    monkeypatch.setattr(logits_chunk, "CHUNK_ELEMENTS", tokens_in_a_chunk * VOCAB)
    hidden, weight, targets = random_inputs()
    ours = vocabulary_parallel_logprobs(hidden, weight, targets, 0, TEMPERATURE, alone, BANNED)
    theirs = reference(hidden, weight, targets, BANNED)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(ours, hidden, weight), gradients(theirs, hidden, weight), rtol=1e-12, atol=1e-12)


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that the allocator had handed out at once during `work`, by its own count."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    changes = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(change.nbytes() for change in sorted(changes, key=lambda event: event.start_ns())))


def test_two_matrices_of_a_chunk_are_the_most_that_is_held(alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four chunks; what is kept for each token is small beside 8192 words. The gradients stay, so they do not count.

    In float32, whose products take no scratch memory from the allocator; that of bf16 products is not small at this size.
    """
    monkeypatch.setattr(logits_chunk, "CHUNK_ELEMENTS", 16 * 8192)
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(8192, 4, requires_grad=True)
    targets, answers = torch.arange(64), []
    forward = peak_bytes(lambda: answers.extend(vocabulary_parallel_logprobs(hidden, weight, targets, 0, TEMPERATURE, alone)))
    backward = peak_bytes(lambda: (answers[0].sum() + answers[1].sum()).backward()) - hidden.grad.nbytes - weight.grad.nbytes
    two_matrices = 2 * 4 * logits_chunk.CHUNK_ELEMENTS
    assert two_matrices <= forward < 1.05 * two_matrices and two_matrices <= backward < 1.05 * two_matrices


def test_no_tokens(alone: dist.ProcessGroup) -> None:
    """A micro-batch may have nothing to predict; its backward still runs, with zeros."""
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    hidden = torch.randn(0, HIDDEN, requires_grad=True)
    answers = vocabulary_parallel_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), 0, TEMPERATURE, alone)
    (answers.logprobs.sum() + answers.entropy.sum()).backward()
    assert {tuple(answer.shape) for answer in answers} == {(0,)} and hidden.grad.shape == (0, HIDDEN)
    assert not weight.grad.any()


def test_a_frozen_output_layer(alone: dist.ProcessGroup) -> None:
    hidden, weight, targets = random_inputs()
    ours = vocabulary_parallel_logprobs(hidden, weight.detach(), targets, 0, TEMPERATURE, alone)
    theirs = reference(hidden, weight.detach(), targets)
    torch.testing.assert_close(gradients(ours, hidden), gradients(theirs, hidden), rtol=1e-12, atol=1e-12)


def test_huge_logits_stay_finite(alone: dist.ProcessGroup) -> None:
    hidden, weight, targets = random_inputs(torch.float32)
    big = (hidden * 1e4).detach().requires_grad_()
    ours = vocabulary_parallel_logprobs(big, weight, targets, 0, TEMPERATURE, alone)
    exact = reference(big.double(), weight.double(), targets)
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=1e-5, atol=1e-2)
    assert all(gradient.isfinite().all() for gradient in gradients(ours, big, weight))


@pytest.mark.parametrize("first_rows", [[0, 4, 7], [0, 1, 7], [0, 7, 7]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_two_shards_are_one_vocabulary(ranks: RankPool, dtype: torch.dtype, first_rows: list[int]) -> None:
    """Uneven shards, and one that is empty. A shard's gradient of hidden is its part: the sum over shards counts."""
    hidden, weight, targets = random_inputs(dtype)
    slopes = torch.arange(1.0, 2 * NUM_TOKENS + 1, dtype=dtype).view(2, NUM_TOKENS)
    exact = reference(hidden.double(), weight.double(), targets)
    grad_hidden, grad_weight = gradients(exact, hidden, weight)
    tolerance = dict(rtol=1e-12, atol=1e-12) if dtype == torch.float64 else dict(rtol=1e-5, atol=1e-5)
    arguments = dict(hidden=hidden.detach(), weight=weight.detach(), targets=targets, temperature=TEMPERATURE, slopes=slopes)
    shards = ranks.run("parallel.on_ranks:sharded_logprobs", Layout(tensor=2), first_rows=first_rows, **arguments)
    for logprob, entropy, hits, _, _ in shards:
        torch.testing.assert_close((logprob, entropy), tuple(x.detach().to(dtype) for x in exact[:2]), **tolerance)
        assert torch.equal(hits, exact.hits)
    torch.testing.assert_close(shards[0][3] + shards[1][3], grad_hidden, **tolerance)
    torch.testing.assert_close(torch.cat([shards[0][4], shards[1][4]]), grad_weight, **tolerance)

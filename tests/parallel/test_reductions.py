"""Sums over ranks in rank order: what they are, that megatron uses nothing else then, and that training is the same with them."""

from __future__ import annotations

import pytest
import torch
from ranks import Layout, RankPool


def values_of(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of very different size, whose sum depends on the order."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(size, generator=generator) * 10 ** torch.randint(-4, 5, (size,), generator=generator).float()).to(dtype)


def sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """One addition after another, in float32."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 3, 4096, 50_002], ids="{} numbers".format)
def test_sums_are_in_rank_order(ranks: RankPool, size: int, dtype: torch.dtype) -> None:
    """Small and large, whether the number of ranks divides them or not."""
    parts = [values_of(rank, size, dtype) for rank in range(4)]
    for result in ranks.run("parallel.on_ranks:sum_over_the_world", Layout(data=4), parts=parts, in_rank_order=True):
        assert torch.equal(result, sum_in_order(parts))


def test_the_backend_adds_in_another_order(ranks: RankPool) -> None:
    """Else the test above would show nothing."""
    parts = [values_of(rank, 50_002, torch.float32) for rank in range(4)]
    [result, *_] = ranks.run("parallel.on_ranks:sum_over_the_world", Layout(data=4), parts=parts, in_rank_order=False)
    assert not torch.equal(result, sum_in_order(parts))
    torch.testing.assert_close(result, sum_in_order(parts), rtol=0, atol=0.01)


def test_shares_of_a_sum_may_lie_in_what_is_summed(ranks: RankPool) -> None:
    """As megatron's gradient buckets do."""
    parts = [values_of(rank, 4000, torch.float32) for rank in range(4)]
    results = ranks.run("parallel.on_ranks:scatter_a_sum", Layout(data=4), parts=parts)
    assert torch.equal(torch.cat(results), sum_in_order(parts))


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize(
    "layout", [Layout(data=2), Layout(tensor=2), Layout(tensor=2, pipeline=2), Layout(context=2, data=2)], ids=str
)
def test_training_in_rank_order(ranks: RankPool, language_model, layout: Layout, distributed: bool) -> None:
    """No sum of torch's is left, two runs give the same bits, and all is as with the backend's sums but for rounding."""
    arguments = dict(directory=language_model("llama"), distributed_optimizer=distributed)
    first, again, plain = (
        ranks.run("parallel.on_ranks:train_and_watch_sums", layout, **arguments, in_rank_order=in_order) for in_order in (True, True, False)
    )
    for one, two, backend in zip(first, again, plain):
        assert one["backend_sums"] == 0 and backend["backend_sums"] > 0
        assert one["grad_norm"] == two["grad_norm"]
        for name, weight in one["weights"].items():
            assert torch.equal(weight, two["weights"][name]), name
            torch.testing.assert_close(weight, backend["weights"][name], rtol=0, atol=2e-6)

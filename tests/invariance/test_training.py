"""Training gives the same numbers on any layout, with either optimizer, at any size of micro-batch: those of transformers.

The reference is transformers and torch.optim.AdamW, fp32, one sequence at a time, on one process.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from ranks import Layout, RankPool
from tiny_models import random_batch, reference_logprobs, reference_values, save_model, tiny_language_model, tiny_value_model
from torch import Tensor

from rlhf_mc.batch import SequenceBatch, gather_segments
from rlhf_mc.config import MicroBatch

BATCH = random_batch([9, 13, 5, 20, 11])
NUM_ANSWERS = int(BATCH.loss_mask.sum())
WANTED = torch.randn(NUM_ANSWERS, generator=torch.Generator().manual_seed(1))

# eps is large, so that an update is a smooth function of the gradient: with the usual 1e-8, Adam's first step is the
# gradient's sign, and rounding decides it where the gradient is about 0. Clipping is active: the norms are above 0.1.
OPTIM = dict(lr=1e-2, eps=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, clip_grad=0.1)
NUM_STEPS = 3

# Sums of fp32 numbers in another order. Of weights about 0.2 to 1 in size, which moved by about 1e-2.
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 2e-6, 2e-6

BY_TOKENS = MicroBatch(tokens=25)  # three micro-batches
LAYOUTS = [
    Layout(),
    Layout(tensor=2),
    Layout(pipeline=2),
    Layout(data=2),
    Layout(tensor=2, pipeline=2),
    Layout(tensor=2, data=2),
    Layout(pipeline=2, data=2),
]
INTERLEAVED_LAYOUTS = [
    Layout(pipeline=2, virtual=2),
    Layout(pipeline=2, virtual=2, tensor=2),
    Layout(pipeline=2, virtual=2, data=2),
    Layout(pipeline=2, virtual=2, context=2),
]
CONTEXT_LAYOUTS = [
    Layout(context=2),
    Layout(context=2, tensor=2),
    Layout(context=2, pipeline=2),
    Layout(context=2, data=2),
]
OPTIMIZERS = pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])


def reference_loss(model, head: str) -> Tensor:
    """As on_ranks.weighted_loss, of the whole batch."""
    if head == "value":
        return 0.5 * (reference_values(model, BATCH) - WANTED).square().mean()
    logprobs, entropy = reference_logprobs(model, BATCH)
    return -(WANTED * logprobs).mean() - 0.01 * entropy.mean()


def reference_optimizer(model) -> torch.optim.Optimizer:
    """Norm weights and biases do not decay."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": OPTIM["weight_decay"]},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=OPTIM["lr"], betas=(OPTIM["beta1"], OPTIM["beta2"]), eps=OPTIM["eps"])


@cache
def reference_training(family: str, head: str) -> dict[str, object]:
    """What on_ranks.train returns, by transformers."""
    model = tiny_value_model(family) if head == "value" else tiny_language_model(family)
    optimizer = reference_optimizer(model)
    losses, grad_norms = [], []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = reference_loss(model, head)
        loss.backward()
        losses.append(loss.item())
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM["clip_grad"])))
        optimizer.step()
    return {"losses": torch.tensor(losses), "grad_norms": torch.tensor(grad_norms), "weights": model.state_dict()}


def trained(ranks: RankPool, layout: Layout, directory: str, head: str = "language", **changes) -> list[dict]:
    """The results of all ranks."""
    arguments = dict(batch=BATCH, wanted=WANTED, budget=BY_TOKENS, distributed_optimizer=True, optim=OPTIM, num_steps=NUM_STEPS)
    return ranks.run("invariance.on_ranks:train", layout, directory=directory, head=head, **{**arguments, **changes})


def assert_same_training(results: list[dict], family: str, head: str = "language") -> None:
    """Of every rank against the reference."""
    expected = reference_training(family, head)
    for result in results:
        torch.testing.assert_close(result["losses"], expected["losses"], rtol=LOSS_TOLERANCE, atol=LOSS_TOLERANCE)
        torch.testing.assert_close(result["grad_norms"], expected["grad_norms"], rtol=1e-5, atol=0)
        assert (result["grad_norms"] > OPTIM["clip_grad"]).all()
        for name, weight in result["weights"].items():
            torch.testing.assert_close(
                weight, expected["weights"][name], rtol=0, atol=WEIGHT_TOLERANCE, msg=lambda m, name=name: f"{name}: {m}"
            )


@OPTIMIZERS
@pytest.mark.parametrize("layout", LAYOUTS + INTERLEAVED_LAYOUTS + CONTEXT_LAYOUTS, ids=str)
def test_layouts(ranks: RankPool, language_model, layout: Layout, distributed: bool) -> None:
    """Tied embeddings: under pipeline, their gradient comes from the first and the last stage."""
    assert_same_training(trained(ranks, layout, language_model("llama"), distributed_optimizer=distributed), "llama")


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(tensor=2, pipeline=2, virtual=2), Layout(tensor=2, context=2)], ids=str)
def test_families(ranks: RankPool, language_model, layout: Layout, family: str) -> None:
    """Biases that are split, norms of query and key that every tensor rank holds whole, untied embeddings, sliding window."""
    assert_same_training(trained(ranks, layout, language_model(family)), family)


@pytest.mark.parametrize("layout", LAYOUTS[:-1] + INTERLEAVED_LAYOUTS[:1] + CONTEXT_LAYOUTS[:3], ids=str)
def test_value_models(ranks: RankPool, value_model, layout: Layout) -> None:
    assert_same_training(trained(ranks, layout, value_model("llama"), "value"), "llama", "value")


BUDGETS = {
    "all at once": MicroBatch(tokens=1000),
    "20 tokens": MicroBatch(tokens=20),
    "1 sequence": MicroBatch(tokens=None, sequences=1),  # an odd number: two data-parallel ranks need a fill
    "2 sequences": MicroBatch(tokens=None, sequences=2),
}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(data=2), Layout(pipeline=2, tensor=2), Layout(pipeline=2, virtual=2), Layout(context=2)], ids=str
)
def test_micro_batches(ranks: RankPool, language_model, layout: Layout, budget: str) -> None:
    assert_same_training(trained(ranks, layout, language_model("llama"), budget=BUDGETS[budget]), "llama")


@pytest.mark.parametrize("layout", [Layout(pipeline=4), Layout(pipeline=4, virtual=2)], ids=str)
def test_deep_pipelines(ranks: RankPool, tmp_path, layout: Layout) -> None:
    """Four stages, whose neighbours are two others; a batch of fewer sequences than stages, and one of twice as many and one more."""
    directory = save_model(tiny_language_model("llama", num_hidden_layers=8), tmp_path / "model")
    for lengths in ([7, 4, 9], [9, 13, 5, 20, 11, 3, 8, 2, 6]):
        batch = random_batch(lengths)
        arguments = dict(batch=batch, wanted=torch.ones(int(batch.loss_mask.sum())), budget=MicroBatch(tokens=None, sequences=1))
        [expected] = trained(ranks, Layout(), directory, **arguments)
        for result in trained(ranks, layout, directory, **arguments):
            torch.testing.assert_close(result["losses"], expected["losses"], rtol=LOSS_TOLERANCE, atol=LOSS_TOLERANCE)
            torch.testing.assert_close(result["grad_norms"], expected["grad_norms"], rtol=1e-5, atol=0)
            torch.testing.assert_close(result["weights"], expected["weights"], rtol=0, atol=WEIGHT_TOLERANCE)


@pytest.mark.parametrize("layout", [Layout(context=2), Layout(context=4), Layout(context=2, data=2)], ids=str)
def test_pairs_are_compared_across_context_ranks(ranks: RankPool, value_model, layout: Layout) -> None:
    """The last tokens of a pair lie on different ranks, and some sequences have no token on some ranks."""
    batch = random_batch([9, 13, 5, 2, 1, 3, 20, 11])
    arguments = dict(directory=value_model("llama"), batch=batch, budget=MicroBatch(tokens=40), optim=OPTIM, num_steps=2)
    [expected] = ranks.run("invariance.on_ranks:train_on_pairs", Layout(), **arguments)
    for result in ranks.run("invariance.on_ranks:train_on_pairs", layout, **arguments):
        torch.testing.assert_close(result["sums"], expected["sums"], rtol=LOSS_TOLERANCE, atol=LOSS_TOLERANCE)
        torch.testing.assert_close(result["grad_norms"], expected["grad_norms"], rtol=1e-5, atol=0)
        torch.testing.assert_close(result["weights"], expected["weights"], rtol=0, atol=WEIGHT_TOLERANCE)


def test_order_of_the_sequences(ranks: RankPool, language_model) -> None:
    order = torch.tensor([3, 0, 4, 2, 1])
    tokens, mask = (gather_segments(values, BATCH.lengths, order) for values in (BATCH.tokens, BATCH.loss_mask))
    batch = SequenceBatch(tokens, BATCH.lengths[order], mask)
    wanted = gather_segments(WANTED, BATCH.lengths - 1, order)
    assert_same_training(trained(ranks, Layout(), language_model("llama"), batch=batch, wanted=wanted), "llama")


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(tensor=2, pipeline=2), Layout(context=2)], ids=str)
def test_the_same_run_gives_the_same_bits(ranks: RankPool, language_model, layout: Layout) -> None:
    first, second = (trained(ranks, layout, language_model("qwen2")) for _ in range(2))
    assert torch.equal(first[0]["losses"], second[0]["losses"])
    for name, weight in first[0]["weights"].items():
        assert torch.equal(weight, second[0]["weights"][name]), name
        assert all(torch.equal(weight, other["weights"][name]) for other in first), f"{name} differs between ranks"


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, pipeline=2, virtual=2), Layout(tensor=2, context=2)], ids=str)
def test_recomputing_changes_no_bit(ranks: RankPool, language_model, value_model, layout: Layout) -> None:
    """The backward computes with the same numbers as the forward did, in the same order; norms of q and k, and a value head, included."""
    for directory, head, dtype in [(language_model("qwen3"), "language", "fp32"), (value_model("llama"), "value", "bf16")]:
        kept, *others = (
            trained(ranks, layout, directory, head, dtype=dtype, recompute=recompute) for recompute in ("none", "selective", "full")
        )
        for other in others:
            for rank, (expected, found) in enumerate(zip(kept, other, strict=True)):
                assert torch.equal(found["losses"], expected["losses"]) and torch.equal(found["grad_norms"], expected["grad_norms"])
                assert found["weights"].keys() == expected["weights"].keys()
                wrong = [name for name, weight in found["weights"].items() if not torch.equal(weight, expected["weights"][name])]
                assert not wrong, (rank, wrong)

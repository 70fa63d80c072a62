"""Training of the heads, alone and jointly: the same numbers on any layout, those of plain autograd on transformers' hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Layout, RankPool
from tiny_models import VOCAB, random_batch, sequences_of, tiny_language_model
from torch import Tensor

from rlhf_mc.medusa.steps import samples_of_steps

BATCH = random_batch([9, 13, 5, 20, 11])
NUM_HEADS, NUM_LAYERS, DECAY = 3, 2, 0.8
MEDUSA = dict(num_heads=NUM_HEADS, num_layers=NUM_LAYERS, loss_decay=DECAY, steps=2)

# As in the invariance tests of the models: eps large, so that an update is smooth in the gradient, and clipping active.
OPTIM = dict(lr=1e-2, eps=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, clip_grad=0.1)
NUM_ITERATIONS = 2

LAYOUTS = [
    Layout(),
    Layout(tensor=2),
    Layout(pipeline=2),
    Layout(data=2),
    Layout(context=2),
    Layout(tensor=2, pipeline=2, virtual=2),
    Layout(tensor=2, data=2),
    Layout(tensor=2, context=2),
]
OUTPUTS = pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
TOLERANCE = dict(rtol=1e-5, atol=2e-6)


@dataclass
class ReferenceHeads:
    """The heads as plain tensors by their names; `model` gives hidden states and the shared output layer."""

    model: Any
    weights: dict[str, Tensor]
    shared: bool

    @staticmethod
    def new(family: str, shared: bool) -> ReferenceHeads:
        model = tiny_language_model(family)
        output = model.lm_head.weight.detach()
        size = output.size(1)
        names = [f"blocks.{k}.layers.{layer}.weight" for k in range(NUM_HEADS) for layer in range(NUM_LAYERS)]
        weights = {name: torch.zeros(size, size) for name in names}
        if not shared:
            weights |= {f"lm_heads.{k}.weight": output.clone() for k in range(NUM_HEADS)}
        return ReferenceHeads(model, {name: weight.requires_grad_() for name, weight in weights.items()}, shared)

    def logits(self, rows: Tensor, head: int) -> Tensor:
        """[n, V] of rows [n, H]."""
        for layer in range(NUM_LAYERS):
            rows = rows + F.silu(rows @ self.weights[f"blocks.{head}.layers.{layer}.weight"].T)
        output = self.model.lm_head.weight.detach() if self.shared else self.weights[f"lm_heads.{head}.weight"]
        return rows @ output.T

    def losses(self, samples: list[int]) -> tuple[list[Tensor], list[float]]:
        """Mean cross entropy of each head, and its accuracy, over the samples; every token but a sequence's first is a target."""
        losses, accuracies = [], []
        for head in range(NUM_HEADS):
            logits, labels = [], []
            for tokens, _ in (sequences_of(BATCH)[sample] for sample in samples):
                ahead = head + 2  # head k = head + 1 predicts token t + k + 1 at position t
                rows = self.model.model(tokens[None]).last_hidden_state[0, : max(0, tokens.numel() - ahead)]
                logits.append(self.logits(rows, head))
                labels.append(tokens[ahead:])
            losses.append(F.cross_entropy(torch.cat(logits), torch.cat(labels)))
            accuracies.append((torch.cat(logits).argmax(-1) == torch.cat(labels)).float().mean().item())
        return losses, accuracies

    def loss(self, samples: list[int]) -> Tensor:
        """What a step minimises."""
        return sum(DECAY**head * loss for head, loss in enumerate(self.losses(samples)[0]))


def adamw(params: list[Tensor]) -> torch.optim.AdamW:
    """With OPTIM."""
    return torch.optim.AdamW(
        params, lr=OPTIM["lr"], betas=(OPTIM["beta1"], OPTIM["beta2"]), eps=OPTIM["eps"], weight_decay=OPTIM["weight_decay"]
    )


def clipped_step(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> float:
    """The gradient norm before clipping."""
    grad_norm = float(torch.nn.utils.clip_grad_norm_(params, OPTIM["clip_grad"]))
    optimizer.step()
    return grad_norm


@cache
def reference_training(shared: bool) -> dict[str, Any]:
    """What on_ranks.train does, by plain autograd: losses and mean gradient norms by iteration, last losses, weights."""
    heads = ReferenceHeads.new("llama", shared)
    heads.model.requires_grad_(False)
    params = list(heads.weights.values())
    optimizer = adamw(params)
    grad_norms = []
    for _ in range(NUM_ITERATIONS):
        of_iteration = []
        for samples in samples_of_steps(len(BATCH), MEDUSA["steps"], seed=1, iteration=0):
            optimizer.zero_grad()
            heads.loss(samples).backward()
            of_iteration.append(clipped_step(optimizer, params))
        grad_norms.append(sum(of_iteration) / len(of_iteration))
    losses, accuracies = heads.losses(list(range(len(BATCH))))
    measured = {f"medusa/head_{k + 1}/loss": loss.item() for k, loss in enumerate(losses)}
    measured |= {f"medusa/head_{k + 1}/accuracy": accuracy for k, accuracy in enumerate(accuracies)}
    measured["medusa/loss"] = sum(DECAY**k * loss.item() for k, loss in enumerate(losses))
    return {"measured": measured, "grad_norms": grad_norms, "weights": {n: w.detach() for n, w in heads.weights.items()}}


def trained(ranks: RankPool, layout: Layout, directory: str, shared: bool = True, **changes: Any) -> list[dict[str, Any]]:
    """The results of all ranks."""
    arguments = dict(batch=BATCH, medusa=MEDUSA | {"shared_output": shared}, optim=OPTIM, num_iterations=NUM_ITERATIONS)
    return ranks.run("medusa.on_ranks:train", layout, directory=directory, **arguments | changes)


def assert_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names in the same order, and the same values to rounding."""
    assert list(found) == list(expected)
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], **TOLERANCE, msg=lambda m, name=name: f"{name}: {m}")


def assert_same_training(results: list[dict[str, Any]], shared: bool) -> None:
    """Of every rank against the reference."""
    expected = reference_training(shared)
    for result in results:
        assert result["measured"] == pytest.approx(expected["measured"], rel=1e-5)
        assert [metrics["medusa/grad_norm"] for metrics in result["metrics"]] == pytest.approx(expected["grad_norms"], rel=1e-5)
        assert_weights(result["after"], expected["weights"])
        assert result["actor untouched"] and result["version"] == 4 and not result["accumulating"]
        assert result["metrics"] == results[0]["metrics"]


@OUTPUTS
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(ranks: RankPool, language_model, layout: Layout, shared: bool) -> None:
    """And the actor's weights, and a gradient that it had accumulated, stay bit for bit what they were."""
    assert_same_training(trained(ranks, layout, language_model("llama"), shared), shared)


@pytest.mark.parametrize("layout", [Layout(tensor=2, pipeline=2), Layout(tensor=2, data=2)], ids=str)
def test_the_plain_optimizer(ranks: RankPool, language_model, layout: Layout) -> None:
    """Its gradient norm is summed over one copy of the model, of which stages before the last have no heads."""
    assert_same_training(trained(ranks, layout, language_model("llama"), distributed_optimizer=False), shared=True)


@pytest.mark.parametrize("layout", [Layout(tensor=2, data=2)], ids=str)
def test_chunks_of_rows_change_nothing(ranks: RankPool, language_model, layout: Layout) -> None:
    """Chunks of four rows: samples are cut, and data-parallel ranks have different numbers of chunks."""
    assert_same_training(trained(ranks, layout, language_model("llama"), chunk_elements=4 * 32), shared=True)


@OUTPUTS
def test_new_heads_say_what_the_actor_says_and_all_of_them_learn(ranks: RankPool, language_model, shared: bool) -> None:
    """On one fixed batch, with an output layer split over two ranks whose last rows are padding."""
    optim = dict(lr=2e-2)
    [result, _] = trained(ranks, Layout(tensor=2), language_model("llama"), shared, optim=optim, num_iterations=10)
    first, last = result["metrics"][0], result["measured"]
    for name, weight in result["before"].items():
        assert weight.shape == ((32, 32) if name.startswith("blocks") else (VOCAB, 32))
        assert bool(weight.any()) == name.startswith("lm_heads")
        assert not torch.equal(weight, result["after"][name]), f"{name} has no gradient"
    for k in range(1, NUM_HEADS + 1):
        assert last[f"medusa/head_{k}/loss"] < 0.5 * first[f"medusa/head_{k}/loss"]
        assert last[f"medusa/head_{k}/accuracy"] > 0.5 > first[f"medusa/head_{k}/accuracy"]
    assert last["medusa/loss"] < 0.5 * first["medusa/loss"] and first["medusa/lr"] == optim["lr"]


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("layout", [Layout(tensor=2, data=2), Layout(pipeline=2)], ids=str)
def test_bf16(ranks: RankPool, language_model, layout: Layout, distributed: bool) -> None:
    """Heads learn in the actor's precision, and every rank exports the same bits."""
    arguments = dict(dtype="bf16", optim=dict(lr=2e-2), num_iterations=10, distributed_optimizer=distributed)
    results = trained(ranks, layout, language_model("llama"), **arguments)
    first, last = results[0]["metrics"][0], results[0]["measured"]
    assert all(weight.dtype == torch.bfloat16 for weight in results[0]["after"].values())
    assert last["medusa/loss"] < 0.5 * first["medusa/loss"]
    for result in results[1:]:
        assert all(torch.equal(weight, results[0]["after"][name]) for name, weight in result["after"].items())


def test_heads_start_from_tensors_and_are_exported_whole(ranks: RankPool, language_model) -> None:
    tensors = {name: torch.randn(weight.shape) for name, weight in reference_training(False)["weights"].items()}
    for layout in (Layout(tensor=2), Layout(tensor=2, pipeline=2)):
        for result in trained(ranks, layout, language_model("llama"), shared=False, tensors=tensors, num_iterations=1):
            assert list(result["before"]) == list(tensors)
            assert all(torch.equal(result["before"][name], tensor) for name, tensor in tensors.items())


def test_tensors_of_other_heads_are_refused(ranks: RankPool, language_model) -> None:
    tensors = {"blocks.0.layers.0.weight": torch.zeros(8, 8)}
    [message] = ranks.run("medusa.on_ranks:error_of_tensors", directory=language_model("llama"), tensors=tensors)
    assert message.startswith("ConfigError: medusa.path: blocks.0.layers.0.weight has shape (8, 8) there, and (32, 32) by the settings")


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, pipeline=2)], ids=str)
def test_the_actors_numbers_are_the_same_bits_with_and_without_heads(ranks: RankPool, language_model, layout: Layout) -> None:
    for result in ranks.run("medusa.on_ranks:bits_with_and_without", layout, directory=language_model("llama"), batch=BATCH):
        assert result == {"scores": True, "gradient": True, "some": True}


JOINT_WEIGHT, NUM_JOINT_STEPS = 0.5, 2


@cache
def reference_joint_training(shared: bool) -> dict[str, Any]:
    """What on_ranks.train_jointly does, by plain autograd."""
    heads = ReferenceHeads.new("qwen2", shared)
    model = heads.model
    body, theirs = list(model.parameters()), list(heads.weights.values())
    decayed, rest = [p for p in body if p.dim() > 1], [p for p in body if p.dim() == 1]
    optimizers = adamw(decayed), adamw(theirs)
    optimizers[0].add_param_group({"params": rest, "weight_decay": 0.0})
    grad_norms, losses = [], []
    for _ in range(NUM_JOINT_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nll = [F.cross_entropy(model(tokens[None]).logits[0, :-1], tokens[1:], reduction="sum") for tokens, _ in sequences_of(BATCH)]
        losses.append(sum(nll).item())
        (sum(nll) / int(BATCH.loss_mask.sum()) + JOINT_WEIGHT * heads.loss(list(range(len(BATCH))))).backward()
        grad_norms.append((clipped_step(optimizers[0], body), clipped_step(optimizers[1], theirs)))
    weights = {name: weight.detach() for name, weight in heads.weights.items()}
    return {"nll": losses, "grad_norms": grad_norms, "actor": model.state_dict(), "heads": weights}


@OUTPUTS
@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(context=2), Layout(pipeline=2, virtual=2, data=2)], ids=str)
def test_joint_training_reaches_the_actor(ranks: RankPool, language_model, layout: Layout, shared: bool) -> None:
    """The gradient of the heads' loss goes into the decoder, on every layout as by autograd; not into its output layer."""
    expected = reference_joint_training(shared)
    results = ranks.run(
        "medusa.on_ranks:train_jointly",
        layout,
        directory=language_model("qwen2"),
        batch=BATCH,
        medusa=MEDUSA | {"shared_output": shared, "joint_weight": JOINT_WEIGHT},
        optim=OPTIM,
        num_steps=NUM_JOINT_STEPS,
    )
    for result in results:
        assert [sums["nll"] for sums in result["sums"]] == pytest.approx(expected["nll"], rel=1e-5)
        assert result["sums"] == results[0]["sums"] and len(result["sums"][0]) == 1 + 3 * NUM_HEADS
        torch.testing.assert_close(torch.tensor(result["grad_norms"]), torch.tensor(expected["grad_norms"]), rtol=1e-5, atol=0)
        assert_weights(result["heads"], expected["heads"])
        assert_weights(result["actor"], {name: expected["actor"][name] for name in result["actor"]})


@pytest.mark.parametrize("layout", [Layout(data=2)], ids=str)
def test_a_rank_may_hold_no_sample(ranks: RankPool, language_model, layout: Layout) -> None:
    """One sequence on two data-parallel ranks, and two steps: the metrics, and the weights, are the same on both."""
    first, second = trained(ranks, layout, language_model("llama"), batch=random_batch([9]))
    assert first["metrics"] == second["metrics"] and first["version"] == NUM_ITERATIONS
    assert all(torch.equal(weight, second["after"][name]) for name, weight in first["after"].items())

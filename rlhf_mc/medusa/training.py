"""Training of the heads: alone, on hidden states kept from a scoring forward (as in PPO), or beside the actor's own loss (SFT)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_mc.algorithms.schedule import lr_at
from rlhf_mc.batch import SequenceBatch
from rlhf_mc.config import Medusa, Settings
from rlhf_mc.medusa.drafter import DraftModel, update_heads
from rlhf_mc.medusa.hidden_states import HiddenStates, StepSamples
from rlhf_mc.medusa.loss import count_labels, head_labels, head_metrics, heads_loss, sum_names
from rlhf_mc.models.heads import padded_output_weight
from rlhf_mc.models.loss import Loss, LossSum
from rlhf_mc.models.passes import zero_gradients
from rlhf_mc.models.role import RoleModel
from rlhf_mc.parallel.packing import PackedMicrobatch

# Elements [n, H] of the rows of one chunk: bounds the device memory of activations to about 10 K L times as many bytes.
_CHUNK_ELEMENTS = 1 << 24


def _pass(
    drafter: DraftModel, actor: RoleModel, hidden: HiddenStates, samples: Sequence[int], counts: Tensor, decay: float
) -> dict[str, float]:
    """Collective over all ranks. The loss of `samples`, with its gradient where gradients are enabled; the sums over all ranks."""
    drafter.check_present("params")
    if drafter.shape.shared_output:
        actor.check_present("params")
    world, names = drafter.world, sum_names(drafter.shape.num_heads)
    totals = torch.zeros(len(names), dtype=torch.float64)
    max_rows = max(1, _CHUNK_ELEMENTS // drafter.shape.hidden)
    for rows, labels in hidden.chunks(samples, max_rows):
        part = heads_loss(drafter.heads, rows, labels, padded_output_weight(actor.last_chunk), decay, counts)
        if torch.is_grad_enabled():
            part.loss.backward()
        if world.grid.speaks:
            totals += torch.stack([part.sums[name].detach().double() for name in names]).cpu()
    return dict(zip(names, world.sum_over_ranks(totals).tolist()))


def step_heads(
    drafter: DraftModel, actor: RoleModel, hidden: HiddenStates, taken: StepSamples, decay: float, lr: float
) -> tuple[dict[str, float], float]:
    """Collective over all ranks. One optimizer step on what it takes: the sums of `sum_names` before it, and the gradient norm.

    The actor gives its output layer, if that is shared, and gets no gradient.
    """
    zero_gradients(drafter)
    drafter.accumulating = True
    sums = _pass(drafter, actor, hidden, taken.samples, taken.counts, decay)
    return sums, update_heads(drafter, lr)


def train_heads(drafter: DraftModel, actor: RoleModel, hidden: HiddenStates, settings: Settings, iteration: int) -> dict[str, float]:
    """Collective over all ranks. The optimizer steps of one iteration of PPO, on what is kept of its samples; medusa/... metrics.

    Losses and accuracies are means over all labels of the steps, each measured before the step that used it.
    """
    section = settings.medusa
    sums = dict.fromkeys(sum_names(drafter.shape.num_heads), 0.0)
    grad_norms: list[float] = []
    for step, taken in enumerate(hidden.taken()):
        lr = lr_at(iteration * section.steps + step, settings.trainer.iterations * section.steps, section.optim)
        of_step, grad_norm = step_heads(drafter, actor, hidden, taken, section.loss_decay, lr)
        sums = {name: total + of_step[name] for name, total in sums.items()}
        grad_norms.append(grad_norm)
    metrics = head_metrics(sums, drafter.shape.num_heads, section.loss_decay)
    return metrics | {"medusa/grad_norm": sum(grad_norms) / len(grad_norms), "medusa/lr": lr}


@torch.no_grad()
def measure_heads(drafter: DraftModel, actor: RoleModel, hidden: HiddenStates, decay: float) -> dict[str, float]:
    """Collective over all ranks. Losses and accuracies on what the steps would take of `hidden`, named as by `train_heads`."""
    taken = hidden.taken()
    samples = [number for step in taken for number in step.samples]
    sums = _pass(drafter, actor, hidden, samples, torch.stack([step.counts for step in taken]).sum(dim=0), decay)
    return head_metrics(sums, drafter.shape.num_heads, decay)


def joint_loss(drafter: DraftModel, actor: RoleModel, batch: SequenceBatch, section: Medusa) -> Loss:
    """For `accumulate_gradients(..., beside=)` on `batch`: joint_weight times the heads' loss (Medusa-2, arXiv:2401.10774, section 2.2.2).

    Its gradient reaches the heads and the actor, though not the actor's output layer through the heads. The caller zeroes
    the heads' gradients before this, and calls `update_heads` after; in between the heads count as accumulating.
    """
    drafter.check_present("params", "gradients")
    num_heads = drafter.shape.num_heads
    counts = count_labels(batch, num_heads)

    def of(rows: Tensor, packed: PackedMicrobatch) -> LossSum:
        labels = head_labels(packed, num_heads)
        part = heads_loss(drafter.heads, rows, labels, padded_output_weight(actor.last_chunk), section.loss_decay, counts)
        return LossSum(section.joint_weight * part.loss, part.sums)

    drafter.accumulating = True
    return Loss(sum_names(num_heads), of)

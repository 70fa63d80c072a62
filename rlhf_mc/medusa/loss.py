"""What each head is to predict, and the loss of all heads: sum over k of decay^(k - 1) CE_k (arXiv:2401.10774, equation 1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_mc.batch import SequenceBatch
from rlhf_mc.medusa.heads import MedusaHeads
from rlhf_mc.models.loss import LossSum
from rlhf_mc.parallel.logprobs import vocabulary_parallel_logprobs
from rlhf_mc.parallel.packing import PackedMicrobatch


@dataclass(frozen=True)
class Labels:
    """What head k (from 1) is to predict at each row, in line k - 1: tokens int64[K, n], right where valid bool[K, n]."""

    tokens: Tensor
    valid: Tensor


def head_labels(packed: PackedMicrobatch, num_heads: int) -> Labels:
    """The labels of this rank's rows of a micro-batch: of head k the token k places after the row's own target.

    Valid where that token is itself a target of the same sequence: no token of a prompt, and none of the next sequence.
    """
    asked, mine, device = packed.asked, packed.mine, packed.rows.device
    # The token k places after a row's target is the target of the row k places on, if there is such a row on any context rank.
    wanted = asked.rows[mine] + torch.arange(1, num_heads + 1)[:, None]
    found = torch.searchsorted(asked.rows, wanted).clamp(max=asked.rows.numel() - 1)
    valid = (asked.rows[found] == wanted) & (asked.sequence_ids[found] == asked.sequence_ids[mine])
    return Labels(asked.targets[found].to(device), valid.to(device))


def count_labels(batch: SequenceBatch, num_heads: int) -> Tensor:
    """int64[K] on the host: how many valid labels each head has in the whole batch."""
    sequences = torch.arange(len(batch)).repeat_interleave(batch.lengths)
    mask = batch.loss_mask
    pairs = ((mask[k:] & mask[:-k] & (sequences[k:] == sequences[:-k])).sum() for k in range(1, num_heads + 1))
    return torch.stack(list(pairs))


def sum_names(num_heads: int) -> tuple[str, ...]:
    """The sums of `heads_loss`: of each head loss, hits and count."""
    return tuple(f"medusa/head_{k}/{what}" for k in range(1, num_heads + 1) for what in ("loss", "hits", "count"))


def heads_loss(heads: MedusaHeads, rows: Tensor, labels: Labels, actors_output: Tensor, decay: float, counts: Tensor) -> LossSum:
    """Collective over the tensor-parallel group. The loss of all heads on `rows` [n, H], and of each head the sums of `sum_names`.

    counts: int64[K], valid labels of each head in the global batch; each head's loss is divided by its own.
    actors_output [V_padded/t, H]: see MedusaHeads.output.  hits: labels that are the head's likeliest token.
    """
    loss = rows.new_zeros((), dtype=torch.float32)
    sums: list[Tensor] = []
    for head, count in enumerate(counts.tolist()):
        output, valid = heads.output(head, actors_output), labels.valid[head]
        answers = vocabulary_parallel_logprobs(heads(rows, head), output.weight, labels.tokens[head], output.first, 1.0, heads.group)
        cross_entropy = -torch.where(valid, answers.logprobs, 0.0).sum()
        loss = loss + decay**head * cross_entropy / max(1, count)
        sums += [cross_entropy, (answers.hits & valid).sum(), valid.sum()]
    return LossSum(loss, dict(zip(sum_names(len(counts)), sums)))


def head_metrics(sums: dict[str, float], num_heads: int, decay: float) -> dict[str, float]:
    """medusa/head_{k}/loss and /accuracy, means over the labels, and medusa/loss, weighed as in training. A head without labels has 0."""
    metrics: dict[str, float] = {}
    total = 0.0
    for k in range(1, num_heads + 1):
        loss, hits, count = (sums[f"medusa/head_{k}/{what}"] for what in ("loss", "hits", "count"))
        metrics |= {f"medusa/head_{k}/loss": loss / max(1.0, count), f"medusa/head_{k}/accuracy": hits / max(1.0, count)}
        total += decay ** (k - 1) * metrics[f"medusa/head_{k}/loss"]
    return metrics | {"medusa/loss": total}

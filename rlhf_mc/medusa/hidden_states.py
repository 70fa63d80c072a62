"""The hidden states that the heads train on, kept in host memory from the actor's scoring forward until the heads' turn."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_mc.medusa.heads import gather_features
from rlhf_mc.medusa.loss import Labels, head_labels
from rlhf_mc.models.passes import HandOver
from rlhf_mc.parallel.packing import PackedMicrobatch
from rlhf_mc.parallel.world import World


@dataclass(frozen=True)
class _Sample:
    """columns: [n, H/t] of the rows of one sample, on the host.  labels: of them, on the host."""

    columns: Tensor
    labels: Labels


class HiddenStates:
    """Of the samples of one iteration, numbered 0 .. num_samples, the rows that answer, detached, and the heads' labels.

    A rank of the last pipeline stage holds the samples that it scored; of their rows it keeps H/t columns, so that the tensor
    ranks share the memory. wanted: the samples to keep; None: all.
    """

    def __init__(self, world: World, num_samples: int, num_heads: int, wanted: Collection[int] | None = None) -> None:
        self.world, self.num_samples, self.num_heads = world, num_samples, num_heads
        self._wanted = torch.zeros(num_samples, dtype=torch.bool)
        self._wanted[slice(None) if wanted is None else sorted(wanted)] = True
        self._samples: dict[int, _Sample] = {}

    def receiver(self, sample_numbers: Sequence[int] | Tensor) -> HandOver:
        """What `score` takes as `hand_over` for a batch whose sequence b is sample sample_numbers[b].

        A sample that comes again takes the place of what was kept of it.
        """
        numbers = torch.as_tensor(sample_numbers)

        def receive(rows: Tensor, packed: PackedMicrobatch) -> None:
            self._keep(rows, head_labels(packed, self.num_heads), numbers[packed.sequence_ids])

        return receive

    def _keep(self, rows: Tensor, labels: Labels, numbers: Tensor) -> None:
        """numbers: int64[n] on the host, whose each row is; those of one sample lie together."""
        wanted = self._wanted[numbers].nonzero().squeeze(1)
        if not wanted.numel():
            return
        index = wanted.to(rows.device)
        width = rows.size(1) // self.world.grid.tensor
        columns = rows.detach().narrow(1, self.world.grid.tensor_rank * width, width)[index].cpu()
        tokens, valid = labels.tokens[:, index].cpu(), labels.valid[:, index].cpu()
        samples, sizes = numbers[wanted].unique_consecutive(return_counts=True)
        parts = zip(*(values.split(sizes.tolist(), dim) for values, dim in ((columns, 0), (tokens, 1), (valid, 1))))
        for sample, (its_columns, its_tokens, its_valid) in zip(samples.tolist(), parts):
            self._samples[sample] = _Sample(its_columns, Labels(its_tokens, its_valid))

    @property
    def num_bytes(self) -> int:
        """Host memory of the rows on this rank."""
        return sum(sample.columns.nbytes for sample in self._samples.values())

    def census(self) -> Tensor:
        """Collective over all ranks. int64[num_samples, 1 + K]: rows of each sample, and valid labels of each head; 0 where not kept."""
        table = torch.zeros(self.num_samples, 1 + self.num_heads, dtype=torch.int64)
        if self.world.grid.speaks:
            for number, sample in self._samples.items():
                table[number, 0] = sample.columns.size(0)
                table[number, 1:] = sample.labels.valid.sum(dim=1)
        return self.world.sum_over_ranks(table)

    def chunks(self, samples: Sequence[int], max_rows: int) -> Iterator[tuple[Tensor, Labels]]:
        """Collective over the tensor-parallel group: every rank must take every item. The rows of `samples` that this rank holds.

        At most `max_rows` at once: [n, H] and labels, on the device, whole on every tensor rank. Nothing where it holds none.
        """
        held = [self._samples[number] for number in samples if number in self._samples]
        if not held:
            return
        columns = torch.cat([sample.columns for sample in held])
        tokens, valid = (torch.cat([getattr(sample.labels, name) for sample in held], dim=1) for name in ("tokens", "valid"))
        device = self.world.device
        for start in range(0, columns.size(0), max_rows):
            end = start + max_rows
            rows = gather_features(columns[start:end].to(device), self.world.tensor_group)
            yield rows, Labels(tokens[:, start:end].to(device), valid[:, start:end].to(device))

    def clear(self) -> None:
        """Forgets all rows and gives their memory back."""
        self._samples.clear()

"""The hidden states that the heads train on, kept in host memory from the actor's scoring forward until the heads' turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_mc.config import Settings
from rlhf_mc.medusa.heads import gather_features
from rlhf_mc.medusa.loss import Labels, head_labels
from rlhf_mc.medusa.steps import first_within, samples_of_steps
from rlhf_mc.models.passes import HandOver
from rlhf_mc.parallel.packing import PackedMicrobatch
from rlhf_mc.parallel.world import World


@dataclass(frozen=True)
class _Sample:
    """columns: [n, H/t] of the rows of one sample on this context rank, on the host.  labels: of them, on the host."""

    columns: Tensor
    labels: Labels


@dataclass(frozen=True)
class StepSamples:
    """samples: what one optimizer step takes, on all ranks together.  counts: int64[K] on the host, valid labels of each head in them."""

    samples: list[int]
    counts: Tensor


class HiddenStates:
    """Of the samples of one iteration the rows that answer, detached, and the heads' labels, for the optimizer steps on them.

    A rank of the last pipeline stage holds the rows that it scored of a sample, and of these it keeps H/t columns: as context ranks
    share the rows, tensor ranks share the memory of each. steps: for each step the samples that it may take, by number and in that
    order; it takes the first, up to `step_tokens` rows on all ranks together. What no step can take anymore is not kept: the
    ranks of a context group hold at most `step_tokens` rows for each step, or one longer sample.
    """

    def __init__(self, world: World, num_heads: int, steps: Sequence[Sequence[int]], step_tokens: int | None = None) -> None:
        self.world, self.num_heads, self.steps, self.step_tokens = world, num_heads, steps, step_tokens
        self._num_rows: dict[int, int] = {}
        self._samples: dict[int, _Sample] = {}

    @staticmethod
    def of(world: World, settings: Settings, iteration: int) -> HiddenStates:
        """For the steps of one iteration of PPO, whose samples are numbered as in its rollout."""
        section = settings.medusa
        steps = samples_of_steps(settings.num_sequences, section.steps, settings.trainer.seed, iteration)
        return HiddenStates(world, section.num_heads, steps, section.step_tokens)

    def receiver(self, sample_numbers: Sequence[int] | Tensor) -> HandOver:
        """What `score` takes as `hand_over` for a batch whose sequence b is sample sample_numbers[b]; each sample comes once."""
        numbers = torch.as_tensor(sample_numbers)

        def receive(rows: Tensor, packed: PackedMicrobatch) -> None:
            self._count(numbers[packed.asked.sequence_ids])
            self._receive(rows, head_labels(packed, self.num_heads), numbers[packed.sequence_ids])

        return receive

    def _count(self, numbers: Tensor) -> None:
        """numbers: int64[N], whose each row of a micro-batch is, on all context ranks."""
        samples, sizes = numbers.unique_consecutive(return_counts=True)
        self._num_rows.update(zip(samples.tolist(), sizes.tolist()))

    def _receive(self, rows: Tensor, labels: Labels, numbers: Tensor) -> None:
        """numbers: int64[n] on the host, whose each row of this rank is; those of one sample lie together."""
        takeable = {number for samples in self.steps for number in first_within(samples, self._num_rows, self.step_tokens)}
        self._samples = {number: sample for number, sample in self._samples.items() if number in takeable}
        kept = torch.isin(numbers, torch.tensor(sorted(takeable), dtype=numbers.dtype)).nonzero().squeeze(1)
        if kept.numel():
            self._keep(rows, labels, numbers, kept)

    def _keep(self, rows: Tensor, labels: Labels, numbers: Tensor, kept: Tensor) -> None:
        """kept: int64[m] on the host, at least one: which of the rows."""
        index = kept.to(rows.device)
        width = rows.size(1) // self.world.grid.tensor
        columns = rows.detach().narrow(1, self.world.grid.tensor_rank * width, width)[index].cpu()
        tokens, valid = labels.tokens[:, index].cpu(), labels.valid[:, index].cpu()
        samples, sizes = (values.tolist() for values in numbers[kept].unique_consecutive(return_counts=True))
        # Copies: a view would keep the rows of the whole micro-batch alive after its other samples are dropped.
        parts = zip(*([part.clone() for part in values.split(sizes, dim)] for values, dim in ((columns, 0), (tokens, 1), (valid, 1))))
        for sample, (its_columns, its_tokens, its_valid) in zip(samples, parts):
            self._samples[sample] = _Sample(its_columns, Labels(its_tokens, its_valid))

    @property
    def num_bytes(self) -> int:
        """Host memory of the rows on this rank."""
        return sum(sample.columns.nbytes for sample in self._samples.values())

    def taken(self) -> list[StepSamples]:
        """Collective over all ranks. What each step takes, the same on every rank, once all samples have come."""
        numbers = [number for samples in self.steps for number in samples]
        table = torch.zeros(len(numbers), 1 + self.num_heads, dtype=torch.int64)
        if self.world.grid.speaks:
            for line, number in enumerate(numbers):
                if self.world.context.rank == 0:  # every context rank knows how many rows they have together
                    table[line, 0] = self._num_rows.get(number, 0)
                if number in self._samples:
                    table[line, 1:] = self._samples[number].labels.valid.sum(dim=1)
        census = dict(zip(numbers, self.world.sum_over_ranks(table)))
        num_rows = {number: int(line[0]) for number, line in census.items()}
        taken = [first_within(samples, num_rows, self.step_tokens) for samples in self.steps]
        none = torch.zeros(self.num_heads, dtype=torch.int64)
        return [StepSamples(samples, sum((census[number][1:] for number in samples), none)) for samples in taken]

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
        self._num_rows.clear()
        self._samples.clear()

"""A training step and a scoring pass on packed sequences against padded ones, on three mixes of lengths.

    bash scripts/bench/run.sh packing [--dtype fp32] [--repeats 7] [--longest 512] [--sequences 32]

Sequences of up to `longest` tokens, of which 5, 25 or 60 % would be padding; one actor, one rank. The padded path is the same code, given
sequences that were filled up to the longest with tokens that nobody asks about: the product has no such path. Both take micro-batches of
the same size, and the head reads the same tokens in both. Measured in turn, in one process.
  ideal   padded FLOPs over packed FLOPs, by the model's own sizes
Its last line is one JSON object: of the mixes with 25 % and more, the lowest speed-up over the ideal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from offload import save_model, seconds, settings_for
from torch import Tensor

from rlhf_mc.batch import SequenceBatch, ragged_arange
from rlhf_mc.config import MicroBatch, Optim
from rlhf_mc.launch import quiet_libraries, use_share_of_cores

MIXES = (0.05, 0.25, 0.60)
IN_A_MICROBATCH = 8  # padded sequences
PROMPT_SHARE = 0.25


def lengths_of(padding: float, num: int, longest: int) -> Tensor:
    """int64[num], sorted by nothing in particular; of num * longest places the share `padding` is empty.

    longest * u^k over the quantiles u: the mean of u^k is 1 / (k + 1). For 60 % that is many short ones and a few long ones.
    """
    quantiles = (torch.arange(num) + 0.5) / num
    lengths = (longest * quantiles ** (padding / (1 - padding))).round().long().clamp(min=4)
    lengths[-1] = longest
    return lengths[torch.randperm(num, generator=torch.Generator().manual_seed(1))]


def packed_batch(lengths: Tensor, vocab: int) -> SequenceBatch:
    """Random tokens; all but the first quarter of each sequence is predicted."""
    tokens = torch.randint(1, vocab, (int(lengths.sum()),), generator=torch.Generator().manual_seed(2))
    prompts = (lengths * PROMPT_SHARE).long().clamp(min=1)
    return SequenceBatch(tokens, lengths, ragged_arange(lengths) >= prompts.repeat_interleave(lengths))


def padded(batch: SequenceBatch) -> SequenceBatch:
    """Every sequence as long as the longest. What was filled in is not predicted."""
    num, longest = len(batch), int(batch.lengths.max())
    real = torch.arange(longest)[None] < batch.lengths[:, None]
    tokens, mask = torch.zeros(num, longest, dtype=torch.int64), torch.zeros(num, longest, dtype=torch.bool)
    tokens[real], mask[real] = batch.tokens, batch.loss_mask
    return SequenceBatch(tokens.flatten(), torch.full((num,), longest), mask.flatten())


class Bench:
    """An actor, and what is measured with it."""

    def __init__(self, dtype: str, longest: int) -> None:
        from rlhf_mc.models.role import Role, build_role
        from rlhf_mc.parallel.world import join_world

        settings = settings_for(dtype, longest)
        world = join_world(settings)
        with tempfile.TemporaryDirectory() as directory:
            path = save_model(Path(directory), 20.0)
            self.model = build_role(Role.ACTOR, "language", path, settings, world, Optim(lr=1e-6))
        self.budget = MicroBatch(tokens=IN_A_MICROBATCH * longest)

    def flops(self, batch: SequenceBatch) -> float:
        """Of a forward pass, in the unit of ModelShape's costs."""
        rows = torch.arange(len(batch)).repeat_interleave(batch.lengths)
        answers = torch.zeros(len(batch), dtype=torch.int64).index_add_(0, rows, batch.loss_mask.long())
        return float(self.model.shape.sequence_cost(True, 1).of(batch.lengths.tolist(), answers.tolist()).sum())

    def train(self, batch: SequenceBatch) -> None:
        """One step on a batch."""
        from rlhf_mc.models.loss import Loss, LossSum
        from rlhf_mc.models.passes import accumulate_gradients, update, zero_gradients

        def loss(answers, _) -> LossSum:
            mean = -answers.logprobs.sum() / int(batch.loss_mask.sum())
            return LossSum(mean, {"loss": mean})

        zero_gradients(self.model)
        accumulate_gradients(self.model, batch, "predicted", self.budget, Loss(("loss",), loss))
        update(self.model, 1e-6)

    def score(self, batch: SequenceBatch) -> None:
        """Log-probs of a batch."""
        from rlhf_mc.models.passes import score

        score(self.model, batch, "predicted", self.budget)


def main() -> None:
    """Measures every mix, prints the table, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="fp32", choices=("bf16", "fp32"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=32)
    arguments = parser.parse_args()
    quiet_libraries()
    use_share_of_cores()
    bench = Bench(arguments.dtype, arguments.longest)
    print(f"{arguments.sequences} sequences of up to {arguments.longest} tokens, {arguments.dtype}, {torch.get_num_threads()} threads")
    print(f"{'padding':>8} {'pass':8}{'padded s':>10}{'packed s':>10}{'speed-up':>10}{'ideal':>8}{'of ideal':>10}")
    ratios: dict[float, list[float]] = {}
    for padding in MIXES:
        packed = packed_batch(lengths_of(padding, arguments.sequences, arguments.longest), bench.model.shape.vocab)
        filled = padded(packed)
        ideal = bench.flops(filled) / bench.flops(packed)
        share = 1 - packed.tokens.numel() / filled.tokens.numel()
        for name, run in (("train", bench.train), ("score", bench.score)):
            run(filled), run(packed)
            times = [(seconds(lambda: run(filled)), seconds(lambda: run(packed))) for _ in range(arguments.repeats)]
            of_padded, of_packed = (statistics.median(column) for column in zip(*times))
            speedup = of_padded / of_packed
            ratios.setdefault(padding, []).append(speedup / ideal)
            row = f"{of_padded:10.3f}{of_packed:10.3f}{speedup:10.2f}{ideal:8.2f}{speedup / ideal:10.2f}"
            print(f"{share:8.0%} {name:8}{row}", flush=True)
    worst = min(min(ratios[padding]) for padding in MIXES[1:])
    result = dict(name="packing", measured=worst, limit=1.0, ratio=worst, unit="of the ideal speed-up")
    print(json.dumps(result | {"at_5_percent": min(ratios[MIXES[0]])}))


if __name__ == "__main__":
    main()

"""How even the work of data-parallel ranks is, and how long the plan takes, against the way before.

    bash scripts/bench/run.sh balance [--seeds 3] [--sequences 100000]

Lengths like those of responses in training, of chat, of reasoning, and uniform ones; sizes of Qwen2.5-0.5B, Llama-3 8B and 70B; 8 to 64
ranks with 8 to 64 sequences each; micro-batches of 16384 tokens. For each: what the heaviest rank costs, over the least it can cost,
which is the larger of the mean over the ranks and the dearest sequence. Costs are the model's FLOPs for each sequence.
  ours     the product's plan
  before   by tokens alone: first-fit decreasing for the number of micro-batches, then longest first to the emptiest
  waits    the same if the ranks had to wait for each other after every micro-batch, not only at the end
Its last line is one JSON object: the heaviest rank of the worst case.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from dataclasses import dataclass
from itertools import product

import numpy as np

from rlhf_mc.config import MicroBatch
from rlhf_mc.launch import quiet_libraries
from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.parallel.microbatches import plan_microbatches

TOKENS = 16384
RANKS, A_RANK = (8, 16, 64), (8, 16, 64)


def shape_of(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> ModelShape:
    """A dense decoder of these sizes; the rest costs nothing."""
    return ModelShape(
        family="llama", num_layers=layers, hidden=hidden, num_heads=heads, num_kv_heads=kv_heads, head_dim=hidden // heads, ffn=ffn,
        vocab=vocab, norm_eps=1e-5, tied=False, qkv_bias=False, qk_norm=False, rope={}, sliding_window=None, max_positions=TOKENS,
        has_value_head=False,
    )  # fmt: skip


SHAPES = {
    "0.5B": shape_of(24, 896, 14, 2, 4864, 151936),
    "8B": shape_of(32, 4096, 32, 8, 14336, 128256),
    "70B": shape_of(80, 8192, 64, 8, 28672, 128256),
}


@dataclass(frozen=True)
class Lengths:
    """prompts, responses: int64[B] tokens."""

    prompts: np.ndarray
    responses: np.ndarray

    @property
    def whole(self) -> np.ndarray:
        """Tokens of each sequence."""
        return self.prompts + self.responses


def lengths_of(kind: str, generator: np.random.Generator, num: int) -> Lengths:
    """Prompts and responses; together no longer than a micro-batch.

    responses: lognormal around 665 tokens, cut off at 8192. chat: Pareto, half of them shorter than 180 tokens, some 100 times as long.
    reasoning: lognormal around 4900 tokens, cut off at the end of the micro-batch.
    """
    prompts = generator.integers(32, 512, num)
    responses = {
        "responses": lambda: np.minimum(generator.lognormal(6.5, 0.9, num), 8192),
        "chat": lambda: 20 + 200 * generator.pareto(1.2, num),
        "reasoning": lambda: generator.lognormal(8.5, 0.8, num),
        "uniform": lambda: generator.integers(1, TOKENS, num),
    }[kind]()
    return Lengths(prompts, np.clip(responses, 1, TOKENS - prompts).astype(np.int64))


KINDS = ("responses", "chat", "reasoning", "uniform")


def plan_before(lengths: list[int], num_ranks: int) -> list[list[list[int]]]:
    """For each rank its micro-batches, by tokens alone."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    packed: list[list[int]] = []
    space: list[int] = []
    for index in order:
        b = next((b for b, free in enumerate(space) if lengths[index] <= free), len(space))
        if b == len(space):
            packed.append([])
            space.append(TOKENS)
        packed[b].append(index)
        space[b] -= lengths[index]
    bins = _longest_first(order, lengths, -(-len(packed) // num_ranks) * num_ranks) or packed
    filled = sorted((b for b in bins if b), key=lambda b: (-sum(lengths[i] for i in b), b))
    filled += [[]] * (-len(filled) % num_ranks)
    return [filled[rank::num_ranks] for rank in range(num_ranks)]


def _longest_first(order: list[int], lengths: list[int], num_bins: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]
    for index in order:
        load, b = heapq.heappop(heap)
        if load + lengths[index] > TOKENS:
            return None
        bins[b].append(index)
        heapq.heappush(heap, (load + lengths[index], b))
    return bins


def plan_ours(lengths: list[int], costs: np.ndarray, num_ranks: int) -> list[list[list[int]]]:
    """For each rank its micro-batches; a fill as an empty one."""
    plan = plan_microbatches(lengths, costs, MicroBatch(tokens=TOKENS), num_ranks)
    return [[[] if m.fill else list(m.sequences) for m in share] for share in plan]


def unevenness(ranks: list[list[list[int]]], costs: np.ndarray) -> tuple[float, float, int]:
    """(heaviest rank, the same with waits after each micro-batch, both over the bound; micro-batches a rank)."""
    loads = np.array([[costs[sequences].sum() for sequences in share] for share in ranks])
    bound = max(costs.sum() / len(ranks), costs.max())
    return loads.sum(axis=1).max() / bound, loads.max(axis=0).sum() / bound, loads.shape[1]


def measure(kind: str, model: str, seeds: int) -> dict:
    """The worst and the mean over numbers of ranks, of sequences, and seeds."""
    results = []
    for num_ranks, a_rank, seed in product(RANKS, A_RANK, range(seeds)):
        lengths = lengths_of(kind, np.random.default_rng(seed), num_ranks * a_rank)
        costs = SHAPES[model].sequence_cost(True, 1).of(lengths.whole, lengths.responses)
        whole = lengths.whole.tolist()
        results.append(unevenness(plan_ours(whole, costs, num_ranks), costs) + unevenness(plan_before(whole, num_ranks), costs))
    ours, waits, count, before, before_waits, before_count = np.array(results).T
    return dict(
        kind=kind, model=model, ours=ours.max(), before=before.max(), ours_mean=ours.mean(), before_mean=before.mean(),
        waits_mean=waits.mean(), before_waits_mean=before_waits.mean(), microbatches=count.sum() / before_count.sum(),
    )  # fmt: skip


def planning_seconds(kind: str, num: int, num_ranks: int) -> tuple[float, float]:
    """(of the clock, of the processor) for one plan of so many sequences."""
    lengths = lengths_of(kind, np.random.default_rng(0), num)
    costs = SHAPES["8B"].sequence_cost(True, 1).of(lengths.whole, lengths.responses)
    whole, clock, processor = lengths.whole.tolist(), time.perf_counter(), time.process_time()
    plan_microbatches(whole, costs, MicroBatch(tokens=TOKENS), num_ranks)
    return time.perf_counter() - clock, time.process_time() - processor


def main() -> None:
    """Measures, prints the tables, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=100_000)
    arguments = parser.parse_args()
    quiet_libraries()
    rows = []
    print(f"heaviest rank over the bound, {TOKENS} tokens a micro-batch; ranks {RANKS}, sequences a rank {A_RANK}, {arguments.seeds} seeds")
    columns = f"{'ours worst':>11}{'mean':>8}{'before worst':>14}{'mean':>8}{'waits mean':>12}{'before':>8}{'count / before':>16}"
    print(f"{'lengths':12}{'model':7}{columns}")
    for kind, model in product(KINDS, SHAPES):
        row = measure(kind, model, arguments.seeds)
        rows.append(row)
        print(
            f"{kind:12}{model:7}{row['ours']:11.4f}{row['ours_mean']:8.4f}{row['before']:14.4f}{row['before_mean']:8.4f}"
            f"{row['waits_mean']:12.3f}{row['before_waits_mean']:8.3f}{row['microbatches']:16.3f}"
        )
    print(f"seconds for a plan of {arguments.sequences} sequences: clock, processor")
    slowest = (0.0, 0.0)
    for kind, num_ranks in product(KINDS, (8, 64)):
        spent = planning_seconds(kind, arguments.sequences, num_ranks)
        slowest = tuple(map(max, slowest, spent))
        print(f"{kind:12}{num_ranks:3} ranks{spent[0]:8.2f}{spent[1]:8.2f}")
    worst = max(rows, key=lambda row: row["ours"])
    result = dict(name="balance", measured=worst["ours"], limit=1.0, ratio=worst["ours"], unit="of the bound")
    before = max(row["before"] for row in rows)
    print(json.dumps(result | dict(before=before, planning_seconds=slowest[0], planning_processor_seconds=slowest[1])))


if __name__ == "__main__":
    main()

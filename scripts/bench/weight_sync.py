"""Weight sync from training layouts to rollout layouts: bytes against the minimum, time against one flat collective of the same bytes.

    bash scripts/bench/run.sh weight_sync [--dtype bf16] [--repeats 7] [--parameters-m 200] [--layouts TP2->TP1 ...]

Each layout runs on as many ranks as share one copy of the model, with real collectives (gloo on CPU). In turn, in one process:
  ours        the product's reshard: packs, exchanges bucket by bucket, writes each block into the engine's weights in place
  unproven    the same without the two checksums of every block
  exchange    unproven, and without the slices that each rank holds itself: what travels, from the trainer's weights into the engine's
  flat        one all-to-all of exactly those bytes, from and to memory that exists already, nothing else
  own         one flat copy of what the rank's rollout shard has from its own training shard; the limit is flat + own
  full gather the way of others: all-gather of every tensor over the model group, each by itself, then the rank takes its slice
Its last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mc.launch import quiet_libraries, use_share_of_cores
from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.models.weight_layout import Shard, engine_pieces, hf_shapes, pieces_of
from rlhf_mc.parallel.exchange import Reshard
from rlhf_mc.parallel.grids import RolloutGrid, TrainingGrid
from rlhf_mc.parallel.reshard import Bucket, Piece, Shapes, plan_reshard
from rlhf_mc.parallel.wire import GroupWire
from rlhf_mc.pipeline.engine_weights import InPlaceWriter

# name -> training TP, training PP, rollout TP
LAYOUTS = {
    "TP2->TP1": (2, 1, 1),
    "TP2->TP2": (2, 1, 2),
    "TP2,PP2->TP1": (2, 2, 1),
    "TP2,PP2->TP2": (2, 2, 2),
    "TP4->TP2": (4, 1, 2),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BUCKET_BYTES = 64 << 20


def shape_of(millions: float) -> ModelShape:
    """A Llama of about so many million parameters, whose heads 4 ranks can share."""
    hidden, ffn, vocab = 1024, 4096, 32000
    per_layer = 3 * hidden * hidden + 3 * hidden * ffn
    layers = max(2, 2 * round((millions * 1e6 - 2 * vocab * hidden) / per_layer / 2))
    return ModelShape(
        family="llama", num_layers=layers, hidden=hidden, num_heads=16, num_kv_heads=8, head_dim=64, ffn=ffn, vocab=vocab, norm_eps=1e-5,
        tied=False, qkv_bias=False, qk_norm=False, rope={}, sliding_window=None, max_positions=4096, has_value_head=False,
    )  # fmt: skip


def shards(pieces: list[Piece], shapes: Shapes, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights that hold the pieces, each whole tensor's row number in every row: wrong rows would show."""
    sizes: dict[str, list[int]] = {}
    for piece in pieces:
        dims = list(shapes[piece.name])
        dims[piece.dim] = piece.start + piece.length
        sizes[piece.param] = [max(pair) for pair in zip(dims, sizes.get(piece.param, dims))]
    return {name: torch.zeros(dims, dtype=dtype) for name, dims in sizes.items()}


class Bench:
    """One layout on this rank."""

    def __init__(self, name: str, dtype: torch.dtype, millions: float) -> None:
        tensor, pipeline, rollout = LAYOUTS[name]
        self.rank, self.dtype = dist.get_rank(), dtype
        self.shape = shape_of(millions)
        self.shapes = hf_shapes(self.shape, value_head=False)
        grid = RolloutGrid(TrainingGrid(tensor * pipeline, self.rank, tensor, pipeline), rollout)
        places = [replace(grid.training, rank=rank) for rank in grid.training.model_ranks()]
        self.held = [pieces_of(self.shape, Shard.of(self.shape, place, False)) for place in places]
        wanted = [engine_pieces(self.shape, rollout, shard) for shard in grid.shards_of_model()]
        self.plan = plan_reshard(self.held, wanted, self.shapes, dtype.itemsize, BUCKET_BYTES, tensor, rollout)
        self.reshard = Reshard(self.plan, GroupWire(dist.group.WORLD), torch.device("cpu"), dtype)
        travelling = tuple(Bucket(tuple(block for block in bucket if not block.is_local)) for bucket in self.plan.buckets)
        self.traveller = Reshard(replace(self.plan, buckets=travelling), GroupWire(dist.group.WORLD), torch.device("cpu"), dtype)
        self.wanted = wanted[self.rank]
        self.params = shards(self.held[self.rank], self.shapes, dtype)
        self.engine = shards(self.wanted, self.shapes, dtype)
        self.writer = InPlaceWriter(self.engine, self.wanted)
        for piece in self.held[self.rank]:
            self._number(self.params, piece)
        self._flat_messages()

    def _numbers(self, piece: Piece) -> Tensor:
        rows = torch.arange(piece.whole_start, piece.whole_end).remainder(101).to(self.dtype)
        dims = [piece.length if d == piece.dim else 1 for d in range(len(self.shapes[piece.name]))]
        return rows.view(dims)

    def _number(self, weights: dict[str, Tensor], piece: Piece) -> None:
        weights[piece.param].narrow(piece.dim, piece.start, piece.length).copy_(self._numbers(piece))

    def check(self) -> None:
        """Raises where the engine's weights are not those of the trainer."""
        for piece in self.wanted:
            rows = self.engine[piece.param].narrow(piece.dim, piece.start, piece.length)
            if not torch.equal(rows, self._numbers(piece).expand_as(rows)):
                raise AssertionError(f"rank {self.rank}: {piece} is wrong")

    def _flat_messages(self) -> None:
        blocks = [block for bucket in self.plan.buckets for block in bucket if not block.is_local]
        ranks = range(self.plan.num_ranks)
        self.sends = [sum(b.numel for b in blocks if (b.source, b.target) == (self.rank, other)) for other in ranks]
        self.receives = [sum(b.numel for b in blocks if (b.target, b.source) == (self.rank, other)) for other in ranks]
        self.out, self.back = (torch.ones(sum(sizes), dtype=self.dtype) for sizes in (self.sends, self.receives))
        own = sum(b.numel for bucket in self.plan.buckets for b in bucket if b.is_local and b.target == self.rank)
        self.own_target, self.own_source = (torch.ones(own, dtype=self.dtype) for _ in range(2))

    def flat(self) -> None:
        """The network's part of the limit."""
        if max(self.plan.received):
            dist.all_to_all_single(self.back, self.out, self.receives, self.sends)

    def own(self) -> None:
        """The memory's part of the limit."""
        self.own_target.copy_(self.own_source)

    def ours(self) -> None:
        """The product's sync, proof and all."""
        self.reshard.run(self.params, self.writer)

    def unproven(self) -> None:
        """Without checksums."""
        self.reshard.run(self.params, self.writer, prove=False)

    def exchange(self) -> None:
        """What travels, alone."""
        self.traveller.run(self.params, self.writer, prove=False)

    def full_gather(self) -> None:
        """Every tensor whole on every rank, one collective each; then the slice."""
        for name, dims in self.shapes.items():
            parts = [sum(p.length for p in held if p.name == name) * prod(dims) // dims[0] for held in self.held]
            longest = max(parts)
            mine = torch.zeros(longest, dtype=self.dtype)
            gathered = torch.empty(longest * len(parts), dtype=self.dtype)
            dist.all_gather_into_tensor(gathered, mine)
            for piece in (p for p in self.wanted if p.name == name):
                place = self.engine[piece.param].narrow(piece.dim, piece.start, piece.length)
                place.copy_(gathered[: place.numel()].view(place.shape))


def seconds(work: Callable[[], None]) -> float:
    """Of the slowest rank, all starting together."""
    dist.barrier()
    start = time.perf_counter()
    work()
    spent = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


def measure(arguments: argparse.Namespace) -> None:
    """One rank's part: all layouts of this number of ranks, whose rows rank 0 writes to arguments.rows."""
    dist.init_process_group("gloo")
    use_share_of_cores()
    rows = []
    for name in arguments.layouts:
        bench = Bench(name, DTYPES[arguments.dtype], arguments.parameters_m)
        ways = {"full_gather": bench.full_gather, "exchange": bench.exchange, "unproven": bench.unproven, "ours": bench.ours, "flat": bench.flat, "own": bench.own}
        for work in ways.values():
            work()
        bench.ours()
        bench.check()
        spent: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(arguments.repeats):
            for way, work in ways.items():
                spent[way].append(seconds(work))
        medians = {way: statistics.median(values) for way, values in spent.items()}
        plan = bench.plan
        rows.append(dict(layout=name, received=max(plan.received), bound=plan.bound, model=plan.model_bytes, **medians))
    if dist.get_rank() == 0:
        Path(arguments.rows).write_text(json.dumps(rows))
    dist.destroy_process_group()


def launch(arguments: argparse.Namespace, num_ranks: int, layouts: list[str]) -> list[dict]:
    """The rows of the layouts of so many ranks."""
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", __file__]
        options = [f"--rows={rows}", f"--dtype={arguments.dtype}", f"--repeats={arguments.repeats}", f"--parameters-m={arguments.parameters_m}"]
        subprocess.run([*command, *options, "--layouts", *layouts], check=True)
        return json.loads(rows.read_text())


def main() -> None:
    """Measures, prints the table, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--parameters-m", type=float, default=200)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS, metavar="LAYOUT")
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    quiet_libraries()
    if arguments.rows:
        measure(arguments)
        return
    rows = []
    for num_ranks in (2, 4):
        layouts = [name for name in arguments.layouts if prod(LAYOUTS[name][:2]) == num_ranks]
        rows += launch(arguments, num_ranks, layouts) if layouts else []
    print(f"model {rows[0]['model'] / 2**20:,.0f} MiB, {arguments.dtype}; medians of {arguments.repeats}, seconds")
    print(f"{'layout':14}{'received MiB':>14}{'/ minimum':>11}{'ours':>9}{'unproven':>10}{'exchange':>10}{'flat':>9}{'own':>9}{'rate':>7}{'of flat':>9}{'full gather':>13}")
    for row in rows:
        row["bytes_ratio"] = row["received"] / row["bound"] if row["bound"] else 1.0 + row["received"] / row["model"]
        row["rate"] = (row["flat"] + row["own"]) / row["unproven"]
        print(
            f"{row['layout']:14}{row['received'] / 2**20:14,.1f}{row['bytes_ratio']:11.3f}{row['ours']:9.3f}{row['unproven']:10.3f}"
            f"{row['exchange']:10.3f}{row['flat']:9.3f}{row['own']:9.3f}{row['rate']:7.2f}{row['flat'] / row['exchange']:9.2f}"
            f"{row['full_gather']:13.3f}"
        )
    worst = min(rows, key=lambda row: row["rate"])
    result = dict(name="weight_sync", measured=worst["unproven"], limit=worst["flat"] + worst["own"], ratio=worst["rate"], unit="s")
    print(json.dumps(result | {"layout": worst["layout"], "bytes_ratio": max(row["bytes_ratio"] for row in rows)}))


if __name__ == "__main__":
    main()

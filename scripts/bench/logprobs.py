"""Memory, bytes across ranks and time of log-probs over a split vocabulary, against their formulas and against gathered logits.

    bash scripts/bench/run.sh logprobs [--dtype bf16] [--tokens 512] [--hidden 256] [--repeats 5] [--vocabularies 32000 ...]

One rank and two tensor-parallel ranks, forward and backward of log-probs and entropy, for each vocabulary V over t ranks:
  memory    the most that the allocator has handed out beyond what existed, without the gradients, which stay. By the code: two float32
            matrices of a chunk of C tokens, forward (logits, their exponentials) and backward (logits, slopes): 8 C V/t bytes; what
            is kept for each token is below 1 % of it. C V/t is 2^24, or the whole batch where that is less
  across    bytes that a rank gives to collectives: the maximum, the sum of exponentials, the target's logit, and for the entropy
            the sum of logits weighted by exponentials, in float32: 16 a token where t > 1, whatever V is
  gathered  the plain way: all-gather the logits, log_softmax in float32, autograd
Its last line is one JSON object: the memory of the worst case in bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf_mc.launch import quiet_libraries, use_share_of_cores
from rlhf_mc.parallel.logits_chunk import chunk_bytes
from rlhf_mc.parallel.logprobs import vocabulary_parallel_logprobs

VOCABULARIES = [32000, 128256, 151936]  # Llama 2, Llama 3, Qwen 2.5
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Case:
    """One batch on one tensor-parallel rank. hidden [n, H]; weight [V/t, H], from row `first`; targets int64[n]; slopes [2, n]."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    slopes: Tensor
    first: int

    @staticmethod
    def of(arguments: argparse.Namespace, vocab: int, device: torch.device) -> Case:
        """The same numbers on every rank; each takes its rows."""
        torch.manual_seed(0)
        dtype, rows = DTYPES[arguments.dtype], vocab // dist.get_world_size()
        first = rows * dist.get_rank()
        hidden = torch.randn(arguments.tokens, arguments.hidden, dtype=dtype)
        weight = torch.randn(vocab, arguments.hidden, dtype=dtype)[first : first + rows] / arguments.hidden**0.5
        targets, slopes = torch.randint(0, vocab, (arguments.tokens,)), torch.randn(2, arguments.tokens)
        hidden, weight, targets, slopes = (tensor.to(device) for tensor in (hidden, weight, targets, slopes))
        return Case(hidden.requires_grad_(), weight.requires_grad_(), targets, slopes, first)

    @property
    def memory_formula(self) -> int:
        """Bytes of two float32 matrices of a chunk."""
        return chunk_bytes(self.hidden.size(0), self.weight.size(0))

    @property
    def across_formula(self) -> int:
        """Bytes: four float32 numbers a token, where there is another rank."""
        return 4 * 4 * self.hidden.size(0) * (dist.get_world_size() > 1)

    def forward(self) -> Tensor:
        """[2, n], log-probs and entropy, our way."""
        answers = vocabulary_parallel_logprobs(self.hidden, self.weight, self.targets, self.first, 1.0, dist.group.WORLD)
        return torch.stack(answers[:2])

    def backward(self, answers: Tensor) -> tuple[Tensor, ...]:
        """This rank's gradients of hidden and weight."""
        return torch.autograd.grad((self.slopes * answers).sum(), (self.hidden, self.weight))

    def ours(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(answers [2, n], gradients)."""
        answers = self.forward()
        return answers.detach(), self.backward(answers)

    def gathered(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The same by log_softmax over whole logits on every rank."""
        shard = self.hidden @ self.weight.t()
        shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, shard.detach())
        logits = torch.cat(shards, dim=1).requires_grad_()
        del shards
        all_logprobs = logits.float().log_softmax(-1)
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        answers = torch.stack((all_logprobs.gather(1, self.targets[:, None]).squeeze(1), entropy))
        (grad,) = torch.autograd.grad((self.slopes * answers).sum(), logits)
        own = grad[:, self.first : self.first + self.weight.size(0)]
        return answers.detach(), torch.autograd.grad(shard, (self.hidden, self.weight), own)


class BytesAcross(TorchDispatchMode):
    """Adds up the bytes of every tensor that a collective is called with."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.total += sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        return func(*args, **(kwargs or {}))


def peak_bytes(work: Callable[[], object], device: torch.device) -> tuple[int, object]:
    """(the most that `work` had allocated at once, its result): by the allocator's own count."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = work()
        return torch.cuda.max_memory_allocated() - before, result
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        result = work()
    changes = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        live += change.nbytes()
        peak = max(peak, live)
    return peak, result


def memory(case: Case, device: torch.device) -> tuple[int, int]:
    """(ours, the larger of forward and backward; gathered), both without the gradients of hidden and weight."""
    in_forward, answers = peak_bytes(case.forward, device)
    in_backward, gradients = peak_bytes(lambda: case.backward(answers), device)
    in_gathered, _ = peak_bytes(case.gathered, device)
    kept = sum(gradient.nbytes for gradient in gradients)
    return max(in_forward, in_backward - kept), in_gathered - kept


def check(case: Case, dtype: str) -> None:
    """Both ways must say the same, or there is nothing to compare."""
    tolerance = dict(rtol=1e-4, atol=1e-4) if dtype == "fp32" else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(case.ours(), case.gathered(), **tolerance)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of all ranks together."""
    dist.barrier()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - start


def measure(arguments: argparse.Namespace) -> None:
    """On each rank: every vocabulary; rank 0 writes the rows."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    use_share_of_cores()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rows = []
    for vocab in arguments.vocabularies:
        case = Case.of(arguments, vocab, device)
        check(case, arguments.dtype)
        with BytesAcross() as across:
            case.ours()
        ours, gathered = memory(case, device)
        row = dict(vocab=vocab, ranks=dist.get_world_size(), memory=ours, memory_formula=case.memory_formula, gathered_memory=gathered)
        row |= dict(across=across.total, across_formula=case.across_formula)
        times = [(seconds(case.ours, device), seconds(case.gathered, device)) for _ in range(arguments.repeats)]
        row["ours"], row["gathered"] = (statistics.median(way) for way in zip(*times))
        rows.append(row)
    if dist.get_rank() == 0:
        Path(arguments.rows).write_text(json.dumps(rows))
    dist.destroy_process_group()


def launch(arguments: argparse.Namespace, num_ranks: int) -> list[dict]:
    """The rows of so many ranks."""
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", __file__]
        sizes = [f"--{name}={getattr(arguments, name)}" for name in ("dtype", "tokens", "hidden", "repeats")]
        vocabularies = [str(vocab) for vocab in arguments.vocabularies]
        silent_profiler = os.environ | {"KINETO_LOG_LEVEL": "99"}
        subprocess.run([*command, f"--rows={rows}", *sizes, "--vocabularies", *vocabularies], check=True, env=silent_profiler)
        return json.loads(rows.read_text())


def main() -> None:
    """Measures, prints the table, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES, metavar="V")
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    quiet_libraries()
    if arguments.rows:
        measure(arguments)
        return
    rows = [row for num_ranks in (1, 2) for row in launch(arguments, num_ranks)]
    print(f"{arguments.tokens} tokens, hidden {arguments.hidden}, {arguments.dtype}; medians of {arguments.repeats}")
    print(f"{'ranks':6}{'V':>8}{'MiB':>9}{'8CV/t':>9}{'ratio':>8}{'gathered':>10}{'across':>9}{'16 n':>8}{'ours, s':>9}{'gathered':>10}")
    for row in rows:
        print(
            f"{row['ranks']:<6}{row['vocab']:8}{row['memory'] / 2**20:9.1f}{row['memory_formula'] / 2**20:9.1f}"
            f"{row['memory'] / row['memory_formula']:8.3f}{row['gathered_memory'] / 2**20:10.1f}"
            f"{row['across']:9}{row['across_formula']:8}{row['ours']:9.3f}{row['gathered']:10.3f}"
        )
    worst = max(rows, key=lambda row: row["memory"] / row["memory_formula"])
    ratio = worst["memory"] / worst["memory_formula"]
    result = dict(name="logprobs", measured=worst["memory"], limit=worst["memory_formula"], ratio=ratio, unit="bytes")
    print(json.dumps(result | {"across_as_expected": all(row["across"] == row["across_formula"] for row in rows)}))


if __name__ == "__main__":
    main()

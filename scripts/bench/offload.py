"""Offload and reload of a whole actor state against memcpy of the same bytes, and against the ways of others.

    bash scripts/bench/run.sh offload [--dtype bf16] [--repeats 7] [--parameters-m 80]

The state is that of a real role: megatron-core model, distributed optimizer, params, main params and moments; at least
1 GiB by default. All ways are measured in turn, in the same process, on the same bytes:
  memcpy        the limit: one flat copy between memory that both sides have touched before (on a GPU: page-locked memory)
  ours          Residency: flat storages, host memory allocated once; params come first, as for scoring, then the rest
  ours, made    the same, but all is asked for at once: 16-bit params are then made from the main params instead of copied
  fresh memory  as verl: flat copies, but host and device memory are allocated anew in each cycle
  per tensor    as Megatron-LM's optimizer: every tensor is copied by itself into fresh memory, pageable on a GPU
Its last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from pages import mapping
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_mc.config import Data, Optim, Rollout, Settings, Trainer
from rlhf_mc.launch import quiet_libraries, use_share_of_cores

WAYS = ("memcpy", "ours", "ours, made", "fresh memory", "per tensor")


def save_model(directory: Path, millions: float) -> str:
    """A Llama of about so many million parameters."""
    hidden, ffn, vocab = 512, 1376, 8192
    per_layer = 4 * hidden * hidden + 3 * hidden * ffn
    layers = max(1, round((millions * 1e6 - vocab * hidden) / per_layer))
    sizes = dict(vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=8)
    config = LlamaConfig(**sizes, tie_word_embeddings=True)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return str(directory)


def settings_for(dtype: str, longest: int = 128) -> Settings:
    """Of roles that are built alone, without data and engine, for sequences of up to `longest` tokens."""
    return Settings(trainer=Trainer(dtype=dtype), data=Data(max_prompt_tokens=longest // 2), rollout=Rollout(max_tokens=longest - longest // 2))


def memcpy(target: Tensor, source: Tensor) -> None:
    """One flat copy, on a GPU asynchronous."""
    if "cuda" in (target.device.type, source.device.type):
        target.copy_(source, non_blocking=True)
    else:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)


def seconds(move: Callable[[], None]) -> float:
    """Of one move, until it is done."""
    wait()
    start = time.perf_counter()
    move()
    wait()
    return time.perf_counter() - start


def wait() -> None:
    """Until a GPU has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def bench_arguments(description: str) -> argparse.Namespace:
    """dtype, repeats, parameters_m. Also does what a program of rlhf_mc does at its start."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--parameters-m", type=float, default=80.0, help="millions of parameters of a role")
    arguments = parser.parse_args()
    quiet_libraries()
    use_share_of_cores()
    return arguments


class Bench:
    """The state, and each way of moving it there and back. Every way moves the same bytes."""

    def __init__(self, dtype: str, millions: float) -> None:
        from rlhf_mc.models.role import Role, build_role
        from rlhf_mc.offload.host_buffer import HostBuffer
        from rlhf_mc.offload import Ledger, ModelState, Part, Residency
        from rlhf_mc.parallel.world import join_world

        settings = settings_for(dtype)
        world = join_world(settings)
        with tempfile.TemporaryDirectory() as directory:
            path = save_model(Path(directory), millions)
            self.model = build_role(Role.ACTOR, "language", path, settings, world, Optim())
        self.device = world.device.type
        self.on_gpu = self.device == "cuda"
        self.params, self.parts = Part.PARAMS, Part.PARAMS | Part.MAIN_PARAMS | Part.OPTIMIZER
        self.state = ModelState.of(self.model)
        self.residency = Residency(world, [self.state], Ledger())
        self.num_bytes = sum(self.state.num_bytes(part) for part in self.parts)
        self.device_flat = torch.ones(self.num_bytes, dtype=torch.uint8, device=world.device)
        self.host_flat = HostBuffer(self.num_bytes, world.device, "limit").bytes.fill_(1)
        self.fresh_device: Tensor | None = self.fresh(self.device)
        self.fresh_host: Tensor | None = None
        self.host_tensors: list[Tensor] = []

    def cycle(self) -> dict[str, tuple[float, float]]:
        """Seconds (to the host, to the device) of each way, once."""
        self.reload()
        self.offload()
        reload, offload = seconds(self.reload_in_turn), seconds(self.offload)
        made = seconds(self.reload), seconds(self.offload)
        to_host = seconds(lambda: memcpy(self.host_flat, self.device_flat))
        to_device = seconds(lambda: memcpy(self.device_flat, self.host_flat))
        cycle = {"memcpy": (to_host, to_device), "ours": (offload, reload), "ours, made": made[::-1]}
        cycle["fresh memory"] = seconds(self.fresh_to_host), seconds(self.fresh_to_device)
        self.reload()
        cycle["per tensor"] = seconds(self.tensors_to_host), seconds(self.tensors_to_device)
        self.offload()
        return cycle

    def offload(self) -> None:
        """All of it goes to the host, as after an update."""
        self.model.version += 1
        self.residency.all_off()

    def reload_in_turn(self) -> None:
        """Every byte is copied."""
        with self.residency.on_device(self.model.role, self.params):
            pass
        self.reload()

    def reload(self) -> None:
        """Params that main params can give back are made from them."""
        with self.residency.on_device(self.model.role, self.parts):
            pass

    def fresh_to_host(self) -> None:
        self.fresh_host = self.fresh("cpu")
        self.fresh_host.copy_(self.fresh_device, non_blocking=True)
        self.fresh_device = None

    def fresh_to_device(self) -> None:
        self.fresh_device = self.fresh(self.device)
        self.fresh_device.copy_(self.fresh_host, non_blocking=True)
        self.fresh_host = None

    def fresh(self, device: str) -> Tensor:
        """Memory that this process has not had before, on a CPU as the C library's malloc gives it for such sizes."""
        if self.on_gpu:
            return torch.empty(self.num_bytes, dtype=torch.uint8, device=device, pin_memory=device == "cpu")
        return torch.frombuffer(mapping(self.num_bytes), dtype=torch.uint8)

    def tensors_to_host(self) -> None:
        self.host_tensors = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors()]

    def tensors_to_device(self) -> None:
        moved = [tensor.to(self.device, copy=True) for tensor in self.host_tensors]
        self.host_tensors = []
        del moved

    def _tensors(self) -> list[Tensor]:
        return [tensor for part, _, tensor in self.state.tensors() if part in self.parts]


def main() -> None:
    """Measures, prints the table, and the JSON line."""
    arguments = bench_arguments(__doc__)
    bench = Bench(arguments.dtype, arguments.parameters_m)
    bench.cycle()
    cycles = [bench.cycle() for _ in range(arguments.repeats)]
    medians = {way: [statistics.median(cycle[way][direction] for cycle in cycles) for direction in (0, 1)] for way in WAYS}
    rates = {way: [bench.num_bytes / 1e9 / median for median in both] for way, both in medians.items()}
    device, gib = bench.device, bench.num_bytes / 2**30
    print(f"{gib:.2f} GiB of params, main params and moments, {arguments.dtype}, {device}")
    print(f"{'':14}{'offload':>10}{'reload':>10}  GB/s, medians of {arguments.repeats}")
    for way, (out, back) in rates.items():
        print(f"{way:14}{out:10.2f}{back:10.2f}")
    limit = max(rates["memcpy"])
    ratios = [ours / limit for ours in rates["ours"]]
    print(f"ours / the better memcpy: {ratios[0]:.2f} offload, {ratios[1]:.2f} reload")
    worse = ratios.index(min(ratios))
    result = dict(name="offload", measured=rates["ours"][worse], limit=limit, ratio=ratios[worse], unit="GB/s")
    result |= dict(gib=gib, offload_ratio=ratios[0], reload_ratio=ratios[1], rates=rates)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

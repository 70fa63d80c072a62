"""All ranks that one torchrun started: those that train and, with engines apart, those that only run engines, and the bridge.

The trainer's ranks come first and the engines' last. Each side is a world of torch.distributed to itself, so that megatron-core
sees only trainers and vLLM only engines; the bridge joins both. All of it is built over the one store that torchrun serves.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from rlhf_mc.config import ConfigError

_TIMEOUT = timedelta(minutes=30)
_WHILE_OTHERS_TRAIN = timedelta(days=365)
_OVER = "over"
_LOOPBACKS = {"lo", "lo0"}  # of Linux, of macOS
# NCCL's last collectives of each rank, written to /tmp/nccl_trace_rank_N when one of them times out. The second name is torch's older one.
_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


@dataclass(frozen=True)
class Job:
    """This rank's place among all ranks of the job. local_rank, local_size: on this host.  num_trainers: the first ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    num_trainers: int

    @staticmethod
    def of(environment: Mapping[str, str], num_engines: int = 0) -> Job:
        """As torchrun says it in the environment; one rank without torchrun."""
        size = int(environment.get("WORLD_SIZE", "1"))
        return Job(
            rank=int(environment.get("RANK", "0")),
            size=size,
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            local_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
            num_trainers=size - num_engines,
        )

    @property
    def num_engines(self) -> int:
        """Ranks that only run engines."""
        return self.size - self.num_trainers

    @property
    def has_engine_only(self) -> bool:
        """Whether this rank only runs an engine."""
        return self.rank >= self.num_trainers

    @property
    def side(self) -> range:
        """The ranks of this rank's world."""
        return range(self.num_trainers, self.size) if self.has_engine_only else range(self.num_trainers)

    def interface(self) -> str | None:
        """The loopback interface, where all ranks are on one host: nobody else can reach gloo's ports then, and the host's name need
        not lead anywhere. None: the one of the host's name.
        """
        loopback = _LOOPBACKS & {name for _, name in socket.if_nameindex()}
        return loopback.pop() if loopback and self.local_size == self.size else None

    def environment(self) -> dict[str, str]:
        """What torchrun would say to this rank if its world were all there is. LOCAL_RANK stays: it is the rank's device."""
        first = self.rank - self.local_rank
        here = range(max(first, self.side.start), min(first + self.local_size, self.side.stop))
        return {
            "RANK": str(self.rank - self.side.start),
            "WORLD_SIZE": str(len(self.side)),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(len(here)),
        }


@dataclass(frozen=True)
class Bridge:
    """The groups over all ranks of a job, outside of torch.distributed's world, with the job's ranks (gloo, for host tensors).

    control: commands and answers; its messages wait for as long as the other side may train.  weights: the weight sync, on CPU.
    store: for communicators that are made later, and for the sign that the run is over.
    """

    job: Job
    control: dist.ProcessGroupGloo
    weights: dist.ProcessGroupGloo
    store: dist.Store

    def say_over(self) -> None:
        """The trainer has left the run at a safe point; the engines, which may be decoding, are to leave too."""
        self.store.set(_OVER, "1")

    def is_over(self) -> bool:
        """Whether the trainer has said so. From any thread."""
        return self.store.check([_OVER])


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of this rank: the CPU, or the GPU with the number of the local rank. Raises ConfigError where it has none."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda, but torch sees no CUDA device; set trainer.device=cpu, or fix the driver")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own ({torch.cuda.device_count()} visible); "
            "start as many ranks a node as it has GPUs"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def start_distributed(job: Job, device: torch.device) -> Bridge | None:
    """Collective over all ranks of the job. Starts torch.distributed with the ranks of this rank's side; gives the bridge, if any.

    From here on the environment says what holds for this side: vLLM reads it.
    """
    os.environ.update(job.environment())
    store: dist.Store = dist.HashStore()
    if "MASTER_ADDR" in os.environ:
        served, _, _ = next(rendezvous("env://", job.rank, job.size, timeout=_TIMEOUT))
        # torchrun keeps its store when it starts the ranks again; what dead ones wrote there would be taken for the addresses of these.
        store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", served)
    if device.type == "cuda":
        for name, value in _FLIGHT_RECORDER.items():
            os.environ.setdefault(name, value)
    if interface := job.interface():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    side = dist.PrefixStore("engines" if job.has_engine_only else "trainer", store)
    dist.init_process_group(backend, store=side, rank=job.rank - job.side.start, world_size=len(job.side), timeout=_TIMEOUT)
    return join_bridge(job, store) if job.num_engines else None


def join_bridge(job: Job, store: dist.Store) -> Bridge:
    """Collective over all ranks of the job. store: the same for all of them."""
    control = dist.ProcessGroupGloo(dist.PrefixStore("bridge/control", store), job.rank, job.size, _WHILE_OTHERS_TRAIN)
    weights = dist.ProcessGroupGloo(dist.PrefixStore("bridge/weights", store), job.rank, job.size, _TIMEOUT)
    return Bridge(job, control, weights, dist.PrefixStore("bridge/nccl", store))

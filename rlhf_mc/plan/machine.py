"""Devices as their data sheets give them, a cluster of one kind, and what is assumed of it beyond the sheets."""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One accelerator. GB/s are 10^9 bytes a second in one direction; the sheets give both directions of a link together.

    memory_gib: what a program can allocate, a little less than the sheet's GB.  tflops: bf16, dense.  hbm_gbs: its memory.
    host_gbs: its link to the host.  link_gbs: to the others of its node.  network_gbs: its share of the network between nodes (no
    sheet says: one NIC a device, of 200 Gbit/s beside an A100, of 400 beside the others, as in NVIDIA's DGX systems).
    """

    name: str
    memory_gib: float
    tflops: float
    hbm_gbs: float
    host_gbs: float
    link_gbs: float
    network_gbs: float


#: Sources: NVIDIA's data sheets "A100 Tensor Core GPU" (2021), "H100 Tensor Core GPU", "H200 Tensor Core GPU", "DGX B200", of the SXM
#: versions; tflops are the sheets' figures with sparsity, halved. H800: as H100, with NVLink of 400 GB/s both ways.
DEVICES = {
    device.name: device
    for device in (
        Device("a100", 79.0, 312, 2039, 32, 300, 25),
        Device("h100", 79.0, 989, 3350, 64, 450, 50),
        Device("h800", 79.0, 989, 3350, 64, 200, 50),
        Device("h200", 139.0, 989, 4800, 64, 450, 50),
        Device("b200", 178.0, 2250, 8000, 64, 900, 50),
    )
}


@dataclass(frozen=True)
class Machine:
    """What a run has: `num_gpus` devices, in nodes of `gpus_per_node`, each node with host_bytes to give.

    device: None where ranks run on the CPU; device memory is host memory then, and no time is predicted.
    memory_bytes: of a device.
    """

    device: Device | None
    num_gpus: int
    gpus_per_node: int
    memory_bytes: int
    host_bytes: int

    @staticmethod
    def of(
        device: str,
        num_gpus: int,
        host_memory_gib: float,
        gpu_memory_gib: float | None = None,
        gpus_per_node: int = 8,
        link_gbs: float | None = None,
        network_gbs: float | None = None,
    ) -> Machine:
        """A cluster of `device`, by its name in DEVICES. Raises KeyError for another name. None: as the table says."""
        sheet = DEVICES[device]
        sheet = replace(sheet, link_gbs=link_gbs or sheet.link_gbs, network_gbs=network_gbs or sheet.network_gbs)
        memory = int((gpu_memory_gib or sheet.memory_gib) * GIB)
        return Machine(sheet, num_gpus, gpus_per_node, memory, int(host_memory_gib * GIB))

    @staticmethod
    def cpu(num_ranks: int, ranks_per_host: int, host_bytes: int) -> Machine:
        """Ranks on the CPU of hosts that have host_bytes to give."""
        return Machine(None, num_ranks, ranks_per_host, host_bytes, host_bytes)

    @property
    def ranks_per_node(self) -> int:
        """Devices of a node that is full."""
        return min(self.gpus_per_node, self.num_gpus)

    @property
    def num_nodes(self) -> int:
        """Nodes, the last one perhaps not full."""
        return -(-self.num_gpus // self.gpus_per_node)

    def with_gpus(self, num_gpus: int) -> Machine:
        """The same kind of cluster, of another size."""
        return replace(self, num_gpus=num_gpus)

    def bandwidth(self, span: int) -> float:
        """Bytes a second, in one direction, between ranks that lie within `span` neighbouring ones."""
        gbs = self.device.link_gbs if span <= self.gpus_per_node else self.device.network_gbs
        return gbs * 1e9


@dataclass(frozen=True)
class Assumptions:
    """What no sheet and no formula gives. Every plan prints these; measure them on your cluster, and put your figures in their place."""

    matmul_efficiency: float = 0.45  #: share of bf16 FLOP/s that passes of the trainer reach, attention included
    masked_attention: float = 2.0  #: time of attention with a mask, as context ranks need it in fp32, over that of the causal kernel
    memory_efficiency: float = 0.7  #: share of the memory's bandwidth that decoding and optimizer steps reach
    link_efficiency: float = 0.75  #: share of a link's bandwidth that collectives and host copies reach
    eager_layer_seconds: float = 2e-4  #: engine, eager: a layer's kernels cannot start faster than this
    graph_layer_seconds: float = 1.5e-5  #: engine, with CUDA graphs: the same
    all_reduce_seconds: float = 1.5e-5  #: engine: latency of one all-reduce inside a node
    padding: float = 1.1  #: places in attention's kernel calls, for each token, where sequences differ in length
    prefill_tokens: int = 8192  #: engine: tokens of one step while prompts are read
    engine_asleep_gib: float = 0.7  #: what a sleeping engine keeps on a device
    graphs_gib: float = 1.0  #: CUDA graphs, where rollout.enforce_eager is false
    context_gib: float = 0.7  #: CUDA context and libraries of a process
    communicator_gib: float = 0.15  #: NCCL's buffers for one group of ranks
    fragmentation: float = 0.04  #: share of a device's memory that torch's allocator cannot use
    sync_gib: float = 0.25  #: a weight sync: two buckets that travel, each sent and received
    process_host_gib: float = 3.0  #: host memory of a rank beside what is planned: torch, megatron-core, vLLM, the batch
    process_cpu_gib: float = 1.2  #: the same of a rank on CPU
    kept_on_cpu: float = 0.5  #: CPU: freed memory that the process keeps, as a share of all else (SmolLM2 recipe of docs/recipes.md)


ASSUMED = Assumptions()

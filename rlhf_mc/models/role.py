"""A role: one model of the four (or the one of supervised training), with its weights, its optimizer, and its forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from rlhf_mc.config import Optim, Settings
from rlhf_mc.models.heads import Sampling, TokenLogprobs, ValueHead, answer_rows, token_logprobs, token_values
from rlhf_mc.models.hf_config import ModelShape, read_shape
from rlhf_mc.models.hf_weights import export_hf_weights, load_hf_weights, save_hf_directory
from rlhf_mc.models.optimizer import build_optimizer, torch_optimizers, wrap_for_training
from rlhf_mc.models.precision import DTYPES
from rlhf_mc.models.roles import Role
from rlhf_mc.models.transformer import Decoder, build_chunks, rotary_table
from rlhf_mc.models.weight_layout import Shard
from rlhf_mc.models.whole_directory import SaveError
from rlhf_mc.parallel.packing import PackedMicrobatch, RotaryTable
from rlhf_mc.parallel.world import World

Head = Literal["language", "value"]


@dataclass(kw_only=True)
class Resident:
    """What takes turns on the device: the weights of one role on this rank, and what trains them. Frozen: neither `ddp` nor `optimizer`.

    ddp: the gradient buckets of each chunk of layers.
    version: how often the weights were changed.  accumulating: gradients were added up, and no update has used them yet.
    """

    role: Role
    world: World
    ddp: tuple[DistributedDataParallel, ...] = ()
    optimizer: MegatronOptimizer | None = None
    version: int = 0
    accumulating: bool = False

    def weights(self) -> Iterator[Tensor]:
        """All that a forward pass reads."""
        raise NotImplementedError

    def params(self) -> dict[str, nn.Parameter]:
        """The parameters on this rank, by names that no two of them share."""
        raise NotImplementedError

    @property
    def buffers(self) -> list:
        """megatron's flat buffers of params and gradients, of all chunks; none of a frozen role."""
        return [buffer for ddp in self.ddp for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)]

    @property
    def shards_optimizer(self) -> bool:
        """Whether the copies of the shard each step a part of it: the distributed optimizer. Of a trained role."""
        return self.ddp[0].ddp_config.use_distributed_optimizer

    def check_present(self, *kinds: Literal["params", "gradients", "optimizer"]) -> None:
        """Raises RuntimeError where memory of these kinds was freed by offload: reading it would crash the process.

        optimizer: main params and moments.
        """
        for kind in kinds:
            if any(tensor.numel() and not tensor.untyped_storage().nbytes() for tensor in self._tensors(kind)):
                raise RuntimeError(
                    f"{self.role.value}: not on the device: {kind}; "
                    f"do this inside `with residency.on_device(Role.{self.role.name}, ...)`, and ask there for all parts that it needs"
                )

    def _tensors(self, kind: str) -> Iterator[Tensor]:
        if kind == "params":
            yield from self.weights()
        elif kind == "gradients":
            yield from (buffer.grad_data for buffer in self.buffers)
        else:
            for optimizer in torch_optimizers(self.optimizer):
                for group in optimizer.param_groups:
                    yield from group["params"]
                for state in optimizer.state.values():
                    yield from (value for value in state.values() if isinstance(value, Tensor))


@dataclass(kw_only=True)
class RoleModel(Resident):
    """One of the four models (or the one of supervised training) on this rank.

    source: the Hugging Face directory it came from.  chunks: of its layers, as many as the virtual pipeline has; the first stage's
    first chunk has the embedding, the last stage's last one the head.
    """

    head: Head
    source: str
    shape: ModelShape
    chunks: tuple[Decoder, ...]
    table: RotaryTable

    def weights(self) -> Iterator[Tensor]:
        """Parameters, buffers, and the rotary table."""
        for chunk in self.chunks:
            yield from chunk.parameters()
            yield from chunk.buffers()
        yield from (self.table.cos, self.table.sin)

    def params(self) -> dict[str, nn.Parameter]:
        """By the names of models/weight_layout.py."""
        return {name: param for chunk in self.chunks for name, param in chunk.params()}

    @property
    def modules(self) -> list[DistributedDataParallel | Decoder]:
        """What megatron's schedules take: the wrapped chunks of a trained role, the bare ones of a frozen role."""
        return [*(self.ddp or self.chunks)]

    @property
    def config(self) -> TransformerConfig:
        """megatron's settings of all chunks."""
        return self.chunks[0].config

    @property
    def last_chunk(self) -> Decoder:
        """The one that the head reads, on the last stage."""
        return self.chunks[-1]

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the params (a value head is in fp32 always)."""
        return self.config.params_dtype

    def head_input(self, hidden: Tensor, packed: PackedMicrobatch) -> Tensor:
        """Collective over the tensor-parallel group. What the head reads of the hidden states [T', 1, H].

        A language head reads the rows that answer, [n, H], whole on every tensor rank; a value head the states as they are.
        """
        return hidden if self.head == "value" else answer_rows(self.last_chunk, hidden, packed)

    def answers(self, head_input: Tensor, packed: PackedMicrobatch, sampling: Sampling) -> TokenLogprobs | Tensor:
        """Collective over the tensor-parallel group. What the head says at the asked rows: TokenLogprobs, or values float32[n]."""
        if self.head == "value":
            return token_values(self.last_chunk, head_input, packed)
        return token_logprobs(self.last_chunk, self.shape, head_input, packed, sampling)

    def export(self):
        """Collective over the model group: every rank must take every item. (Hugging Face name, whole tensor)."""
        self.check_present("params")
        return export_hf_weights(self.params(), self.shape, self.world, self.head == "value")

    def save(self, target: str) -> None:
        """Collective over all ranks. Rank 0 writes a Hugging Face directory at `target`; SaveError on every rank where it cannot."""
        tensors, writes = self.export(), self.world.rank == 0
        self.world.together(
            lambda: save_hf_directory(tensors, self.source, target, self.head == "value", self.dtype, writes), SaveError
        )


def build_role(role: Role, head: Head, path: str, settings: Settings, world: World, optim: Optim | None = None) -> RoleModel:
    """Collective over all ranks. The role's model with the weights at `path`; trained where `optim` is given, else frozen."""
    model = empty_role(role, head, path, settings, world, trained=optim is not None)
    load_hf_weights(model.params(), model.shape, Shard.of(model.shape, world.grid, head == "value"), path, f"{role.value}.path")
    if optim is not None:
        start_training(model, settings, optim)
    return model


def empty_role(role: Role, head: Head, path: str, settings: Settings, world: World, trained: bool) -> RoleModel:
    """No collective. The role's model, its weights not yet set, in the shape of the config.json at `path`."""
    key = f"{role.value}.path"
    shape = read_shape(path, key)
    shape.check_layout(settings.parallel, key)
    dtype = DTYPES[settings.trainer.dtype]
    is_value = head == "value"
    recompute = settings.trainer.recompute if trained else "none"
    chunks = build_chunks(shape, world.grid, dtype, world.device, shape.tied and not is_value, recompute)
    table = rotary_table(shape, settings.longest_sequence, world.device, key)
    model = RoleModel(role=role, head=head, source=path, shape=shape, world=world, chunks=chunks, table=table)
    if is_value and world.grid.is_last_stage:
        with world.device:
            model.last_chunk.output_layer = ValueHead(shape.hidden, model.config.sequence_parallel)
    for chunk in chunks:
        chunk.requires_grad_(trained).train(trained)
    return model


def start_training(model: RoleModel, settings: Settings, optim: Optim) -> None:
    """Collective over all ranks. Gives a model, whose weights are there, its gradient buckets and its optimizer."""
    model.ddp = tuple(wrap_for_training(chunk, settings.parallel.distributed_optimizer) for chunk in model.chunks)
    model.optimizer = build_optimizer(model.ddp, optim, model.dtype, model.world.device)

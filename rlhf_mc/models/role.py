"""A role: one model of the four (or the one of supervised training), with its weights, its optimizer, and its forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rlhf_mc.config import Optim, Settings
from rlhf_mc.models.heads import Sampling, TokenLogprobs, ValueHead, answer_rows, token_logprobs, token_values
from rlhf_mc.models.hf_config import ModelShape, read_shape
from rlhf_mc.models.hf_weights import export_hf_weights, load_hf_weights, save_hf_directory
from rlhf_mc.models.optimizer import build_optimizer, torch_optimizers, wrap_for_training
from rlhf_mc.models.precision import DTYPES
from rlhf_mc.models.roles import Role
from rlhf_mc.models.transformer import Decoder, build_decoder, rotary_table
from rlhf_mc.models.weight_layout import Shard
from rlhf_mc.parallel.packing import PackedMicrobatch, RotaryTable
from rlhf_mc.parallel.world import World

Head = Literal["language", "value"]


@dataclass(kw_only=True)
class Resident:
    """What takes turns on the device: the weights of one role on this rank, and what trains them. Frozen: neither `ddp` nor `optimizer`.

    version: how often the weights were changed.  accumulating: gradients were added up, and no update has used them yet.
    """

    role: Role
    world: World
    ddp: DistributedDataParallel | None = None
    optimizer: MegatronOptimizer | None = None
    version: int = 0
    accumulating: bool = False

    def weights(self) -> Iterator[Tensor]:
        """All that a forward pass reads."""
        raise NotImplementedError

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
            yield from (buffer.grad_data for buffer in self.ddp.buffers)
        else:
            for optimizer in torch_optimizers(self.optimizer):
                for group in optimizer.param_groups:
                    yield from group["params"]
                for state in optimizer.state.values():
                    yield from (value for value in state.values() if isinstance(value, Tensor))


@dataclass(kw_only=True)
class RoleModel(Resident):
    """One of the four models (or the one of supervised training) on this rank.

    source: the Hugging Face directory it came from.
    """

    head: Head
    source: str
    shape: ModelShape
    decoder: Decoder
    table: RotaryTable

    def weights(self) -> Iterator[Tensor]:
        """Parameters, buffers, and the rotary table."""
        yield from self.decoder.parameters()
        yield from self.decoder.buffers()
        yield from (self.table.cos, self.table.sin)

    @property
    def module(self) -> DistributedDataParallel | Decoder:
        """What megatron's schedules take: the wrapped decoder of a trained role, the bare one of a frozen role."""
        return self.ddp or self.decoder

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the params (a value head is in fp32 always)."""
        return self.decoder.config.params_dtype

    def head_input(self, hidden: Tensor, packed: PackedMicrobatch) -> Tensor:
        """Collective over the tensor-parallel group. What the head reads of the hidden states [T', 1, H].

        A language head reads the rows that answer, [n, H], whole on every tensor rank; a value head the states as they are.
        """
        return hidden if self.head == "value" else answer_rows(self.decoder, hidden, packed)

    def answers(self, head_input: Tensor, packed: PackedMicrobatch, sampling: Sampling) -> TokenLogprobs | Tensor:
        """Collective over the tensor-parallel group. What the head says at the asked rows: TokenLogprobs, or values float32[n]."""
        if self.head == "value":
            return token_values(self.decoder, head_input, packed)
        return token_logprobs(self.decoder, self.shape, head_input, packed, sampling)

    def export(self):
        """Collective over the model group: every rank must take every item. (Hugging Face name, whole tensor)."""
        self.check_present("params")
        return export_hf_weights(self.decoder, self.shape, self.world, self.head == "value")

    def save(self, target: str) -> None:
        """Collective over the model group. Writes a Hugging Face directory at `target`, on rank 0's copy of the model."""
        save_hf_directory(self.export(), self.source, target, self.head == "value", self.dtype, writes=self.world.rank == 0)


def build_role(role: Role, head: Head, path: str, settings: Settings, world: World, optim: Optim | None = None) -> RoleModel:
    """Collective over all ranks. The role's model with the weights at `path`; trained where `optim` is given, else frozen."""
    key = f"{role.value}.path"
    shape = read_shape(path, key)
    shape.check_layout(world.grid.tensor, world.grid.pipeline, key)
    dtype = DTYPES[settings.trainer.dtype]
    is_value = head == "value"
    recompute = "none" if optim is None else settings.trainer.recompute
    decoder = build_decoder(shape, world.grid, dtype, world.device, shape.tied and not is_value, recompute)
    if is_value and world.grid.is_last_stage:
        with world.device:
            decoder.output_layer = ValueHead(shape.hidden, decoder.config.sequence_parallel)
    shard = Shard.of(shape, world.grid.tensor, world.grid.tensor_rank, world.grid.pipeline, world.grid.stage, is_value)
    load_hf_weights(decoder, shape, shard, path, key)
    longest = settings.longest_sequence
    table = rotary_table(shape, longest, world.device, key)
    model = RoleModel(role=role, head=head, source=path, shape=shape, world=world, decoder=decoder, table=table)
    if optim is None:
        decoder.requires_grad_(False)
    else:
        model.ddp = wrap_for_training(decoder, settings.parallel.distributed_optimizer)
        model.optimizer = build_optimizer(model.ddp, optim, dtype, world.device)
    decoder.eval() if optim is None else decoder.train()
    return model

"""ModelState: everything that a role keeps in device memory, sorted into parts, each part in a few flat storages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor

from rlhf_mc.models.optimizer import megatron_parts, torch_optimizers
from rlhf_mc.models.role import Resident, Role
from rlhf_mc.offload.arena import Arena, adopt, pack, storage_key
from rlhf_mc.offload.layout import CHUNK_BYTES
from rlhf_mc.offload.minimum import RoleBytes
from rlhf_mc.offload.parts import TRAINING, Part


@dataclass(frozen=True)
class ModelState:
    """The arenas of each part of one role. A frozen role has PARAMS only; its other parts are empty, as all are where it has no weights.

    derived: keys of the arenas of PARAMS that hold nothing but 16-bit copies of main params.
    weights: the model's, listed once: to walk through its modules at every visit would take longer than a copy of some MiB.
    """

    model: Resident
    arenas: dict[Part, tuple[Arena, ...]]
    derived: frozenset[int]
    weights: tuple[Tensor, ...]

    @staticmethod
    def of(model: Resident, chunk_bytes: int = CHUNK_BYTES) -> ModelState:
        """Flattens the role's state, once, with all of it on the device. megatron's own buffers stay as they are.

        What megatron allocated tensor by tensor (params of a frozen role or under the plain optimizer, main params, moments)
        moves into arenas that the same tensor objects view from then on. Every storage of PARAMS can be cut evenly over
        the ranks that hold the same shard.
        """
        buffers = adopt(_param_buffers(model))
        held = {arena.key for arena in buffers}
        every_weight = tuple(model.weights())
        weights = _owners(t for t in every_weight if storage_key(t) not in held)
        multiple = model.world.grid.copies
        params = buffers + pack([t for t in weights if _has_main_param(t)], chunk_bytes, multiple=multiple)
        derived = {storage_key(t) for t in every_weight if _has_main_param(t)}
        params += pack([t for t in weights if not _has_main_param(t)], chunk_bytes, multiple=multiple)
        held = {arena.key for arena in params}
        main_params = _owners(t for t in _stepped_params(model) if storage_key(t) not in held)
        moments = _owners(_moments(model))
        # The step counters are scalars: each at its own element, for kernels take them one by one anyway.
        steps = pack([t for t in moments if not t.dim()], chunk_bytes, alignment=1)
        arenas = {
            Part.PARAMS: params,
            Part.GRADS: adopt(buffer.grad_data for buffer in model.buffers),
            Part.MAIN_PARAMS: pack(main_params, chunk_bytes),
            Part.OPTIMIZER: pack([t for t in moments if t.dim()], chunk_bytes) + steps,
        }
        state = ModelState(model, {part: tuple(of_part) for part, of_part in arenas.items()}, frozenset(derived), every_weight)
        state.check_wiring()
        return state

    @property
    def role(self) -> Role:
        """Whose state it is."""
        return self.model.role

    @property
    def is_frozen(self) -> bool:
        """Whether it has params that nothing trains."""
        return self.model.optimizer is None and bool(self.weights)

    def num_bytes(self, part: Part) -> int:
        """Bytes of one part on this rank."""
        return sum(arena.num_bytes for arena in self.arenas[part])

    def role_bytes(self) -> RoleBytes:
        """What the pure functions of `minimum.py` take."""
        derived = sum(arena.num_bytes for arena in self.arenas[Part.PARAMS] if arena.key in self.derived)
        return RoleBytes({part: self.num_bytes(part) for part in TRAINING}, derived)

    @property
    def makes_params(self) -> bool:
        """Whether some params are not stepped here: they are copies of main params, or other ranks step them."""
        return bool(self.derived) or self.model.shards_optimizer and self.model.world.grid.copies > 1

    def rebuild_params(self) -> None:
        """Collective over the copies of the shard (with the distributed optimizer). Sets all params from what the ranks step.

        The bits are those that the last update left: that is how it made them, and loading weights sets both.
        """
        with torch.no_grad():
            for optimizer in megatron_parts(self.model.optimizer):
                if not isinstance(optimizer, FP32Optimizer):  # which steps the params themselves
                    optimizer._copy_main_params_to_model_params()
            if self.model.shards_optimizer and self.model.world.grid.copies > 1:
                for ddp in self.model.ddp:
                    ddp.start_param_sync(force_sync=True)

    def drop_gradients(self) -> None:
        """Forgets the optimizer's views of the gradient buckets, which are about to be freed."""
        self.model.optimizer.zero_grad()

    def tensors(self) -> Iterator[tuple[Part, str, Tensor]]:
        """Every tensor of the role that has device memory: (part, description, tensor). Main params in fp32 count as PARAMS."""
        for i, weight in enumerate(self.weights):
            yield Part.PARAMS, f"weight {i}", weight
            if hasattr(weight, "main_grad"):
                yield Part.GRADS, f"gradient {i}", weight.main_grad
        fp32 = {arena.key for arena in self.arenas[Part.PARAMS]}
        for i, param in enumerate(_stepped_params(self.model)):
            yield Part.PARAMS if storage_key(param) in fp32 else Part.MAIN_PARAMS, f"main param {i}", param
        for i, moment in enumerate(_moments(self.model)):
            yield Part.OPTIMIZER, f"moment {i}", moment

    def check_wiring(self) -> None:
        """Raises RuntimeError where a tensor of the role lies outside its part's arenas, and so would not be moved with it."""
        keys = {part: {arena.key for arena in arenas} for part, arenas in self.arenas.items()}
        for part, what, tensor in self.tensors():
            if storage_key(tensor) not in keys[part]:
                raise RuntimeError(
                    f"{self.role.value}: {what} of {tuple(tensor.shape)} lies outside the storages of {part.label}; something "
                    "replaced its memory after the state was made (assigning .data, loading an optimizer state): "
                    "copy into it instead"
                )


def _owners(tensors: Iterator[Tensor]) -> list[Tensor]:
    """The distinct tensors; each must have a storage of its own, or packing one would tear it from the other."""
    distinct = list({id(tensor): tensor for tensor in tensors}.values())
    if len({storage_key(tensor) for tensor in distinct}) != len(distinct):
        raise RuntimeError(
            "two tensors of a model share one storage outside megatron's buffers; they cannot be packed separately "
            "(has the state of this model been made before? it is made once)"
        )
    return distinct


def _param_buffers(model: Resident) -> list[Tensor]:
    return [buffer.param_data for buffer in model.buffers if buffer.param_data is not None]


def _has_main_param(weight: Tensor) -> bool:
    return hasattr(weight, "main_param")


def _optimizers(model: Resident) -> list[torch.optim.Optimizer]:
    return [] if model.optimizer is None else torch_optimizers(model.optimizer)


def _stepped_params(model: Resident) -> Iterator[Tensor]:
    """What the optimizer steps: fp32 main params, or the (shards of the) params themselves where these are fp32."""
    for optimizer in _optimizers(model):
        for group in optimizer.param_groups:
            yield from group["params"]


def _moments(model: Resident) -> Iterator[Tensor]:
    for optimizer in _optimizers(model):
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

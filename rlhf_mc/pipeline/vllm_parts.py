"""What the engine plugs into vLLM: an executor that places this rank in the rollout grid, a weight-transfer engine, sampling with drafts.

Imported by engine.py only, after the environment that vLLM reads at import was set.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import vllm.distributed.parallel_state as vllm_groups
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from rlhf_mc.config import ConfigError
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.medusa.shape import engine_pieces as heads_pieces
from rlhf_mc.models.hf_config import read_shape
from rlhf_mc.models.weight_layout import engine_pieces, hf_shapes
from rlhf_mc.parallel.grids import RolloutGrid
from rlhf_mc.parallel.reshard import Block, Piece
from rlhf_mc.pipeline.engine_weights import InPlaceWriter, ReloadWriter, TwoWriters, WeightWriter
from rlhf_mc.pipeline.vllm_sampling import DraftChecker, HeadsProposer, SeededSampler

BLOCKS_BACKEND = "rlhf_mc_blocks"


def check_head_dim(head_dim: int) -> None:
    """Raise ConfigError for a size of attention heads that vLLM has no CPU kernel for; it would fail at the first prompt."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # of no use where there is a GPU

    supported = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in supported:
        raise ConfigError(
            f"actor.path: vLLM's CPU attention has no kernel for head_dim {head_dim}, only for {supported}; choose another model"
        )


def executor_for(grid: RolloutGrid, ident: str) -> type:
    """vLLM's executor for torchrun, with the tensor-parallel groups of `grid` and `ident` in the names of its shared memory.

    vLLM makes groups of neighbouring ranks; it takes a group that exists already when its size is right. All other groups
    are of one rank here, so they are made first as for single ranks, and then the tensor-parallel one as the grid wants it.

    vLLM names shared memory by the last part of the init method. Under torchrun that is empty, so that two jobs on one host
    would take each other's segments. The method itself is not used: torch.distributed is initialised already.
    """

    class GridExecutor(ExecutorWithExternalLauncher):
        """The external launcher, placed.  scheduled: what the scheduler ordered for the last step; None before the first."""

        scheduled: SchedulerOutput | None = None

        def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
            self.scheduled = scheduler_output
            return super().execute_model(scheduler_output, non_block)

        def _init_executor(self) -> None:
            method, rank, local_rank = self._distributed_args()
            os.environ["VLLM_DIST_IDENT"] = ident
            backend = current_platform.dist_backend
            with set_current_vllm_config(self.vllm_config):
                vllm_groups.init_distributed_environment(grid.world_size, rank, method, local_rank, backend)
                vllm_groups.initialize_model_parallel(1, backend=backend)
                vllm_groups._TP = vllm_groups.init_model_parallel_group(
                    [grid.ranks_of(replica) for replica in range(grid.num_replicas)],
                    local_rank,
                    backend,
                    use_message_queue_broadcaster=True,
                    group_name="tp",
                )
            super()._init_executor()

        def _distributed_args(self) -> tuple[str, int, int]:
            _, rank, local_rank = super()._distributed_args()
            return f"file:///{ident}", rank, local_rank

    return GridExecutor


class HeadsWriter(InPlaceWriter):
    """In place, as vLLM's heads are plain modules; where output layers of their own were repacked, as on CPU, they are again."""

    def __init__(self, model: nn.Module, pieces: Sequence[Piece]) -> None:
        super().__init__(dict(model.named_parameters()), pieces)
        self._outputs = [] if not hasattr(model, "lm_heads") else list(model.lm_heads)

    def finish(self) -> None:
        """The padding is clear, and the weights are packed anew."""
        super().finish()
        for output in self._outputs:
            output.quant_method.process_weights_after_loading(output)


@dataclass
class BlocksUpdate(WeightTransferUpdateInfo):
    """Blocks of this process's memory: for those to come the engine puts their places into `places`, or they are `filled`."""

    blocks: Sequence[Block]
    places: list[Tensor] = field(default_factory=list)
    filled: bool = False


class BlocksTransferEngine(WeightTransferEngine[WeightTransferInitInfo, BlocksUpdate]):
    """Takes blocks from the trainer in the same process: vLLM's start, update and finish, with a writer that fits the model.

    heads: the model that drafts, where there is one, and its shape. Its weights come in the same updates.
    """

    init_info_cls = WeightTransferInitInfo
    update_info_cls = BlocksUpdate
    heads: tuple[nn.Module, HeadsShape] | None = None

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Nothing: trainer and engine share a process."""

    def start_weight_update(self) -> None:
        """Opens an update of all weights."""
        self._writer.start()

    @cached_property
    def _writer(self) -> WeightWriter:
        """Made at the first use, when the models have their final form."""
        if self.heads is None:
            return self._model_writer
        model, shape = self.heads
        tensor_group = vllm_groups.get_tp_group()
        pieces = heads_pieces(shape, tensor_group.world_size, tensor_group.rank_in_group)
        return TwoWriters(self._model_writer, HeadsWriter(model, pieces), {piece.name for piece in pieces})

    @property
    def _model_writer(self) -> WeightWriter:
        shape = read_shape(self.model_config.model, "actor.path")
        tensor_group = vllm_groups.get_tp_group()
        pieces = engine_pieces(shape, tensor_group.world_size, tensor_group.rank_in_group)
        params = dict(self.model.named_parameters())
        if InPlaceWriter.fits(params, pieces):
            return InPlaceWriter(params, pieces)
        return ReloadWriter(
            pieces,
            hf_shapes(shape, value_head=False),
            shape.tied,
            self.model_config.dtype,
            begin=lambda: initialize_layerwise_reload(self.model),
            load=self.model.load_weights,
            end=lambda: finalize_layerwise_reload(self.model, self.model_config),
        )

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """One step. Without vLLM's synchronisation of the device: blocks come on the stream that will read them."""
        self.receive_weights(BlocksUpdate(**update_info))

    def receive_weights(self, update_info: BlocksUpdate) -> None:
        """Says where blocks shall go, or takes note that they are there."""
        if update_info.filled:
            self._writer.filled(update_info.blocks)
        else:
            update_info.places += self._writer.places(update_info.blocks)

    def finish_weight_update(self) -> None:
        """Closes the update; the new weights are in use."""
        self._writer.finish()

    @property
    def writes_in_place(self) -> bool:
        """Whether updates go straight into the weights that the model computes from."""
        writer = self._writer.first if isinstance(self._writer, TwoWriters) else self._writer
        return isinstance(writer, InPlaceWriter)

    def shutdown(self) -> None:
        """Nothing to release."""


def register_blocks_engine() -> None:
    """Puts the engine into vLLM's registry, once in a process."""
    if BLOCKS_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BLOCKS_BACKEND, BlocksTransferEngine)


@dataclass(frozen=True)
class Sampling:
    """What draws and drafts in vLLM now.  checker, proposer: None without heads."""

    checker: DraftChecker | None
    proposer: HeadsProposer | None


def install_sampling(worker: Any, heads: HeadsShape | None) -> Sampling:
    """Puts our sampling into a worker of vLLM whose models are loaded; `heads` where it has a model that drafts."""
    runner = worker.model_runner
    runner.sampler = SeededSampler(runner)
    if heads is None:
        return Sampling(None, None)
    runner.rejection_sampler = DraftChecker(runner.sampler)
    runner.drafter = HeadsProposer(runner.drafter, runner.model)
    worker.weight_transfer_engine.heads = runner.drafter.model, heads
    return Sampling(runner.rejection_sampler, runner.drafter)

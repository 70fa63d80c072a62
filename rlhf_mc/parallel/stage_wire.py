"""What pipeline stages send each other: hidden states on, gradients back, of sizes that both sides know before the schedule starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from rlhf_mc.parallel.grids import TrainingGrid
from rlhf_mc.parallel.microbatches import arrivals

_NOTHING = [0, 0, 0]


class StageWire(P2PCommunicator):
    """megatron's communicator between stages, for micro-batches of unequal sizes.

    megatron sends the shape of each tensor just before the tensor, and the host of the receiver waits for it. Every stage has the
    plan of micro-batches, so it knows what will arrive, and nothing needs to be sent.
    """

    def __init__(self, stages: dist.ProcessGroup, config: TransformerConfig, rows: Sequence[int], grid: TrainingGrid) -> None:
        """For one run of a schedule. rows: of the hidden states [rows, 1, H] of each micro-batch on a rank."""
        super().__init__(stages, config)
        self._shapes = [[n, 1, config.hidden_size] for n in rows]
        self._from_previous = iter(arrivals(len(rows), grid.pipeline, grid.virtual, leads=grid.is_first_stage))
        self._from_next = iter(arrivals(len(rows), grid.pipeline, grid.virtual, leads=grid.is_last_stage))

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """The shapes of what comes next from the stage before, and from the stage after."""
        return (
            self._shapes[next(self._from_previous)] if recv_prev else _NOTHING,
            self._shapes[next(self._from_next)] if recv_next else _NOTHING,
        )

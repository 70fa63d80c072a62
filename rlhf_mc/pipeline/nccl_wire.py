"""A weight sync between GPUs of two worlds: NCCL by vLLM's own communicator, which needs no torch.distributed world.

vLLM's NCCLWeightTransferEngine broadcasts whole tensors from one rank, the whole model to every engine rank: it
cannot carry a plan of blocks. Its engine over NCCL's M2N sends whole what is fused in the engine (qkv, gate and up).
So what travels is ours, and the communicator is theirs.

vLLM is imported when a wire is made, after the environment that it reads at import is set.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_mc.parallel.job import Bridge
from rlhf_mc.parallel.wire import GlooWire, Message, Pending, Wire
from rlhf_mc.pipeline.engine_process import vllm_environment


def wire_over(bridge: Bridge, device: torch.device) -> Wire:
    """Collective over all ranks of the job: what carries weights from the trainer's ranks to the engines'."""
    return GlooWire(bridge.weights) if device.type == "cpu" else NcclWire(bridge, device)


class _Arrival:
    """Messages whose end is marked in the stream that carries them."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._end = stream.record_event()

    def wait(self) -> None:
        """Makes the present stream wait; the host goes on."""
        torch.cuda.current_stream().wait_event(self._end)


class NcclWire:
    """Messages run on a stream of their own, so that copies on the present stream go on beside them.

    A message starts when the present stream has come to it. Its memory is safe once its arrival was waited for: what is
    freed afterwards is given away in the order of the present stream.
    """

    def __init__(self, bridge: Bridge, device: torch.device) -> None:
        """Collective over all ranks of the job."""
        with vllm_environment(cuda=True):
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
            from vllm.distributed.utils import StatelessProcessGroup
            from vllm.utils.nccl import unpinned_nccl_env

            self.name, self.rank = "the job", bridge.job.rank
            self._stream = torch.cuda.Stream(device)
            ranks = StatelessProcessGroup(rank=bridge.job.rank, world_size=bridge.job.size, store=bridge.store)
            # vLLM sets NCCL variables for itself, on which all ranks of a communicator must agree; and where it finds no stream
            # of its own making, it puts one in place of this thread's.
            with unpinned_nccl_env(), torch.cuda.stream(self._stream):
                self._communicator = PyNcclCommunicator(ranks, device=device)
        if self._communicator.disabled:
            raise RuntimeError(
                "vLLM could not load NCCL, which carries weights to separate engines; unset VLLM_DISABLE_PYNCCL, or install NCCL"
            )

    def start(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[Pending]:
        """One NCCL group. Every rank starts its groups in the order of the plan, so that none waits in a circle."""
        if not receives and not sends:
            return []
        self._stream.wait_stream(torch.cuda.current_stream())
        self._communicator.group_start()
        for message in receives:
            self._communicator.recv(message.tensor, message.peer, self._stream)
        for message in sends:
            self._communicator.send(message.tensor, message.peer, self._stream)
        self._communicator.group_end()
        return [_Arrival(self._stream)]

    def sum(self, values: Tensor) -> None:
        """Collective over the wire. NCCL runs one operation of a communicator at a time: this one follows all messages."""
        self._stream.wait_stream(torch.cuda.current_stream())
        self._communicator.all_reduce(values, values, stream=self._stream)
        _Arrival(self._stream).wait()

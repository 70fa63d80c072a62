"""What trainer rank 0 and the ranks of separate engines say to each other over the bridge: commands one way, answers the other.

Rank 0 commands, every engine rank obeys in the order of the commands, and the first rank of a replica answers for it.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor
from torch.distributed import Work

from rlhf_mc.medusa.draft_length import DraftSchedule
from rlhf_mc.parallel.job import Bridge
from rlhf_mc.pipeline.dispatch import Completion, SampleRequest

COMMANDER = 0
_TAG = 0
_SECONDS_UNTIL_ENDED = 3.0


class BridgeError(RuntimeError):
    """The other end of the bridge is gone. What it died of, it says itself."""


@dataclass(frozen=True)
class Ready:
    """What every engine rank says unasked, once its engine has started."""


@dataclass(frozen=True)
class TakeWeights:
    """Take part in a weight sync, after which the engine holds `version`. No answer."""

    version: int


@dataclass(frozen=True)
class ComputeLogprobs:
    """Log-probs of `token_ids` from weights `version`. Every engine rank answers with a tensor, see Engine.logprobs."""

    token_ids: list[int]
    version: int


@dataclass(frozen=True)
class Generate:
    """Sample this rank's share from weights `version`. Each replica answers every `steps` engine steps, see Progress.

    schedule: how many tokens to draft.
    """

    requests: Mapping[int, SampleRequest]
    version: int
    steps: int
    greedy: bool
    schedule: DraftSchedule


@dataclass(frozen=True)
class Stop:
    """Leave the job. No answer."""


Command = TakeWeights | ComputeLogprobs | Generate | Stop


@dataclass(frozen=True)
class ReplicaLoad:
    """What one replica did in one rollout. tokens: sampled.  busy, idle: seconds with something to decode, and without.

    running: mean number of sequences in a step.  longest: tokens of its longest response.
    drafts: the numbers of its DraftStatistics.
    """

    tokens: int
    busy: float
    idle: float
    running: float
    longest: int
    drafts: Sequence[float] = ()


@dataclass(frozen=True)
class Progress:
    """What a replica finished since its last answer. load: in its last answer of a rollout, what it did; None before."""

    finished: Mapping[int, Completion]
    load: ReplicaLoad | None = None


@dataclass(frozen=True)
class Sending:
    """A message on its way; holds the memory that it is read from."""

    works: Sequence[Work]
    content: Sequence[Tensor]
    peers: Sequence[int]

    def wait(self) -> None:
        """Until it was taken. Raises BridgeError where the other end is gone."""
        for work in self.works:
            _wait(work, f"rank {' or '.join(map(str, self.peers))}")


class Control:
    """One end of the bridge's control group. Objects travel by pickle, between processes of one job."""

    def __init__(self, bridge: Bridge) -> None:
        self._group = bridge.control

    def start(self, messages: Mapping[int, object]) -> Sending:
        """Sends each rank its message; the other end takes it when it comes to it."""
        works, content = [], []
        for rank, message in messages.items():
            data = torch.from_numpy(numpy.frombuffer(bytearray(pickle.dumps(message)), dtype=numpy.uint8))
            size = torch.tensor([data.numel()])
            works += [self._group.send([size], rank, _TAG), self._group.send([data], rank, _TAG)]
            content += [size, data]
        return Sending(works, content, list(messages))

    def receive(self, rank: int) -> object:
        """Waits for a message of `rank`, for as long as it takes. Raises BridgeError where that rank is gone.

        There is no receiving from whichever rank comes first: gloo does not tell it that a rank is gone.
        """
        size = torch.zeros(1, dtype=torch.int64)
        _wait(self._group.recv([size], rank, _TAG), f"rank {rank}")
        data = torch.empty(int(size), dtype=torch.uint8)
        _wait(self._group.recv([data], rank, _TAG), f"rank {rank}")
        return pickle.loads(data.numpy().data)


def _wait(work: Work, peer: str) -> None:
    try:
        work.wait()
    except RuntimeError as error:  # gloo's only kind
        # torchrun ends this rank meanwhile, so that only the rank that failed is read.
        time.sleep(_SECONDS_UNTIL_ENDED)
        raise BridgeError(f"{peer} of the job does not answer any more; look for its own message ({error})") from error

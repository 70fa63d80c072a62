"""The random generators of a rank, as JSON has them: python's, numpy's, torch's, and megatron's."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from rlhf_mc.checkpoint.disk import FileRecord, write_json
from rlhf_mc.parallel.world import World


def generator_states(world: World) -> dict[str, Any]:
    """The states of this rank's generators now."""
    kind, numbers, position, has_gauss, gauss = numpy.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, numbers.tolist(), position, has_gauss, gauss],
        "torch": _text(torch.get_rng_state()),
        "megatron": {name: _text(state) for name, state in get_cuda_rng_tracker().get_states().items()},
    }
    if not world.on_cpu:
        states["cuda"] = _text(torch.cuda.get_rng_state(world.device))
    return states


def write_generators(states: dict[str, Any], rank: int, directory: Path) -> FileRecord:
    """Writes the states of a rank's generators. Raises CheckpointError."""
    return write_json(directory / _file_name(rank), states)


def read_generators(world: World, directory: Path, rank: int) -> None:
    """Sets this rank's generators to those that `rank` wrote."""
    states = json.loads((directory / _file_name(rank)).read_text())
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, numbers, *rest = states["numpy"]
    numpy.random.set_state((kind, numpy.array(numbers, dtype=numpy.uint32), *rest))
    torch.set_rng_state(_tensor(states["torch"]))
    get_cuda_rng_tracker().set_states({name: _tensor(state) for name, state in states["megatron"].items()})
    if not world.on_cpu:
        torch.cuda.set_rng_state(_tensor(states["cuda"]), world.device)


def _file_name(rank: int) -> str:
    return f"rank{rank:05d}.generators.json"


def _text(state: Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)

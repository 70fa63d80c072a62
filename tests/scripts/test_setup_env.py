"""What setup_env.sh says when it cannot do its work, and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "setup_env.sh"
NO_NETWORK = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_RETRIES": "1",
}


def setup_env(venv: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"RLHF_MC_VENV": str(venv), "RLHF_MC_DEVICE": "cpu", "RLHF_MC_PYTHON": sys.executable, **environment}
    return subprocess.run(
        ["bash", str(SCRIPT)], env=os.environ | settings, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120
    )


def command(folder: Path, name: str, body: str) -> Path:
    """An executable of that name, to stand before the real one in PATH."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return file


def test_an_old_python_is_refused(tmp_path: Path):
    program = "import sys; sys.version_info = (3, 10); exec(sys.argv[1])"
    old = command(tmp_path, "python-old", f'exec {sys.executable} -c "{program}" "$2"')
    done = setup_env(tmp_path / "venv", RLHF_MC_PYTHON=str(old))
    assert done.returncode == 1 and "needs Python 3.11 or newer" in done.stderr and str(old) in done.stderr
    assert not (tmp_path / "venv").exists()


def test_an_unknown_device_is_refused(tmp_path: Path):
    done = setup_env(tmp_path / "venv", RLHF_MC_DEVICE="tpu")
    assert done.returncode == 1 and "RLHF_MC_DEVICE=tpu: must be cpu or gpu" in done.stderr


def test_too_little_disk_is_said_before_anything_is_written(tmp_path: Path):
    command(tmp_path, "df", "echo header; echo disk 100 98 2048 98% /")
    done = setup_env(tmp_path / "venv", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1 and "has 2 MiB free" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_directory_of_someone_else_is_left_alone(tmp_path: Path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.txt").write_text("years of work")
    done = setup_env(tmp_path / "venv")
    assert done.returncode == 1 and "Remove it, or set RLHF_MC_VENV" in done.stderr
    assert (tmp_path / "venv" / "thesis.txt").read_text() == "years of work"


def test_without_network_it_says_so_and_the_next_run_starts_over(tmp_path: Path):
    for beginning in ("", "did not finish: starting over"):
        done = setup_env(tmp_path / "venv", **NO_NETWORK)
        assert done.returncode == 1 and beginning in done.stdout
        assert "pip cannot reach its package index" in done.stderr
        assert not (tmp_path / "venv" / ".rlhf_mc_stamp").exists()

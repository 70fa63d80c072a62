"""Runs a few lines of Python in a process of their own, with the repository's root as its folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_program(program: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """`program` as `python -c`, with output captured as text."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120)

"""scripts/cpu_memory.sh: in a program that it starts, memory that was freed comes back without new pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUM_MIB = 256
PROGRAM = f"""
import resource, torch
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    start = faults()
    block = torch.ones({NUM_MIB} << 18)
    spent = faults() - start
    del block
print(spent)
"""


@pytest.mark.skipif(
    not list(Path(sys.prefix).glob("lib/python3*/site-packages/cmeel.prefix/lib/libmimalloc.so")), reason="a GPU environment has no mimalloc"
)
def test_freed_memory_is_kept() -> None:
    plain = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "MIMALLOC_PURGE_DELAY", "GLIBC_TUNABLES")}
    commands = f'source scripts/cpu_memory.sh "{sys.prefix}" && "{sys.executable}" -c "$1"'
    kept = subprocess.run(["bash", "-c", commands, "bash", PROGRAM], cwd=ROOT, env=plain, capture_output=True, text=True, check=True)
    pages = NUM_MIB << 20 >> 12
    assert int(kept.stdout) < pages / 50

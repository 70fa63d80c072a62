"""What memory costs that this process has not had before: memmove into it, against memmove into memory that it has touched.

    bash scripts/bench/run.sh pages [--mib 256] [--repeats 7]

The reason for scripts/cpu_memory.sh and for the huge pages of offload's host copies. Linux only. Its last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import statistics
import time
from collections.abc import Callable

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python's mmap has no name for
WAYS = {
    "touched before": None,
    "fresh": (),
    "fresh, populated by one call": (_POPULATE_WRITE,),
    "fresh, huge pages": (mmap.MADV_HUGEPAGE,),
    "fresh, huge pages, populated": (mmap.MADV_HUGEPAGE, _POPULATE_WRITE),
}


def mapping(num_bytes: int) -> mmap.mmap:
    """Private memory without pages yet."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def address(memory: mmap.mmap) -> int:
    """Where it starts."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def seconds(source: mmap.mmap, advice: tuple[int, ...] | None, touched: mmap.mmap) -> float:
    """Of one copy, with the making and the end of the memory where it is fresh."""
    start = time.perf_counter()
    target = touched if advice is None else mapping(len(source))
    for one in advice or ():
        target.madvise(one)
    ctypes.memmove(address(target), address(source), len(source))
    if target is not touched:
        target.close()
    return time.perf_counter() - start


def median_rate(num_bytes: int, once: Callable[[], float], repeats: int) -> float:
    """GB/s."""
    once()
    return num_bytes / 1e9 / statistics.median(once() for _ in range(repeats))


def main() -> None:
    """Measures, prints the table, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    num_bytes = arguments.mib << 20
    source, touched = mapping(num_bytes), mapping(num_bytes)
    for memory in (source, touched):
        memory.write(b"\1" * num_bytes)
    rates = {
        way: median_rate(num_bytes, lambda advice=advice: seconds(source, advice, touched), arguments.repeats) for way, advice in WAYS.items()
    }
    print(f"memmove of {arguments.mib} MiB into memory that is      GB/s, medians of {arguments.repeats}")
    for way, rate in rates.items():
        print(f"  {way:32}{rate:8.2f}")
    result = dict(name="pages", measured=rates["fresh"], limit=rates["touched before"], ratio=rates["fresh"] / rates["touched before"])
    print(json.dumps(result | dict(unit="GB/s", rates=rates)))


if __name__ == "__main__":
    main()

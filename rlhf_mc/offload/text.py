"""Bytes and tables for people to read. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def readable(num_bytes: float) -> str:
    """A number of bytes in the largest binary unit that keeps it above 1, with three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1000 or unit == "GiB":
            break
        num_bytes /= 1024
    digits = 0 if unit == "B" or abs(num_bytes) >= 100 else 1 if abs(num_bytes) >= 10 else 2
    return f"{num_bytes:.{digits}f} {unit}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text in columns; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)

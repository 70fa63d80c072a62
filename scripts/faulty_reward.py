"""The reward of scripts/faults.py: the share of digits in a response; or what WILD_REWARD says, as of a broken scorer."""

from __future__ import annotations

import os


def digits(sample) -> float:
    """From 0 to 1."""
    words = sample.response.split()
    return float(os.environ.get("WILD_REWARD") or sum(word.isdigit() for word in words) / max(1, len(words)))

"""The reward of scripts/faults.py: the share of digits in a response; beyond all bounds where WILD_REWARD is set, as of a broken scorer."""

from __future__ import annotations

import os


def digits(sample) -> float:
    """From 0 to 1."""
    words = sample.response.split()
    return 1e30 if os.environ.get("WILD_REWARD") else sum(word.isdigit() for word in words) / max(1, len(words))

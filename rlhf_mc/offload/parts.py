"""The four parts of a role's state, and what the trace calls their bytes. Pure."""

from __future__ import annotations

from enum import Flag, auto


class Part(Flag):
    """PARAMS: weights and buffers.  GRADS: gradient buckets.  MAIN_PARAMS: fp32 masters of 16-bit weights (empty in fp32).

    OPTIMIZER: Adam's moments and step counters. Combine with `|`.
    """

    PARAMS = auto()
    GRADS = auto()
    MAIN_PARAMS = auto()
    OPTIMIZER = auto()

    @property
    def label(self) -> str:
        """Its name in tables and metrics; of a combination, the names joined by `|`."""
        return "|".join(part.name.lower() for part in self) or "nothing"


#: Before the name of a role: the counter of its bytes on the device in the trace.
ON_DEVICE = "device/"

#: What an optimizer step needs.
TRAINING = Part.PARAMS | Part.GRADS | Part.MAIN_PARAMS | Part.OPTIMIZER

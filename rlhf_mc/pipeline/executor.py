"""Runs a schedule: one operation after the other, on the one thread of this rank that issues collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlhf_mc.pipeline.schedule import Operation


class Work(Protocol):
    """What the operations mean; each is collective over all ranks."""

    def generate(self, chunks: Sequence[int]) -> None:
        """Until these chunks are complete."""

    def submit(self, chunks: Sequence[int]) -> None:
        """Hands them to the reward functions; does not wait."""

    def sleep(self) -> None:
        """The engine has nothing left to do."""

    def score(self, role: str, chunks: Sequence[int]) -> None:
        """One pass of the role over these chunks."""

    def collect(self) -> None:
        """Waits for the reward functions."""


def execute(operations: Sequence[Operation], work: Work) -> None:
    """Collective over all ranks, which run the same operations."""
    for operation in operations:
        if operation.kind == "score":
            work.score(operation.role, operation.chunks)
        elif operation.kind in ("sleep", "collect"):
            getattr(work, operation.kind)()
        else:
            getattr(work, operation.kind)(operation.chunks)

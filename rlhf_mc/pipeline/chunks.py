"""Cuts a rollout into chunks while it is being sampled. Pure: what it makes depends on what finished in which exchange only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Chunk = tuple[int, ...]
By = Literal["prompts", "finished"]


class Chunker:
    """Gives chunks, as many as asked for (fewer where there are fewer samples), each the sorted numbers of its samples.

    by prompts: neighbouring prompts share a chunk, which is ready when all their samples have finished; chunks come in order.
    by finished: whichever samples finish first make the first chunk, so that a straggler holds back none but the last.
    Every sample is in one chunk; no chunk is empty; their sizes differ by one at most, by prompts by one prompt.
    """

    def __init__(self, num_prompts: int, samples_per_prompt: int, num_chunks: int, by: By) -> None:
        """Raises ValueError without prompts, samples or chunks: an empty chunk would be scored by nobody."""
        if min(num_prompts, samples_per_prompt, num_chunks) < 1:
            raise ValueError(f"{num_prompts} prompts x {samples_per_prompt} samples in {num_chunks} chunks: each must be positive")
        unit = samples_per_prompt if by == "prompts" else 1
        num_units = num_prompts * samples_per_prompt // unit
        count = min(num_chunks, num_units)
        bounds = [number * num_units // count * unit for number in range(count + 1)]
        self.sizes = [end - start for start, end in zip(bounds, bounds[1:])]
        self._by, self._bounds = by, bounds
        self._ready = 0
        self._waiting: dict[int, None] = {}

    def add(self, finished: Iterable[int]) -> list[Chunk]:
        """The chunks that these samples complete."""
        self._waiting |= dict.fromkeys(sorted(finished))
        chunks = []
        while self._ready < len(self.sizes) and (chunk := self._next()) is not None:
            for sample in chunk:
                del self._waiting[sample]
            chunks.append(chunk)
            self._ready += 1
        return chunks

    def _next(self) -> Chunk | None:
        size = self.sizes[self._ready]
        if self._by == "finished":
            first = list(self._waiting)[:size]
            return tuple(sorted(first)) if len(first) == size else None
        samples = range(self._bounds[self._ready], self._bounds[self._ready + 1])
        return tuple(samples) if all(sample in self._waiting for sample in samples) else None

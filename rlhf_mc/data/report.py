"""What was left out of a data set for its length, for rank 0 to print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_mc.data.rows import DataError

NUM_NAMED = 10


@dataclass(frozen=True)
class DropReport:
    """Rows that were longer than the setting `key` allows. `dropped` holds (file:number, num_tokens) of each, in file order."""

    what: str
    key: str
    limit: int
    num_rows: int
    dropped: tuple[tuple[str, int], ...]

    @property
    def num_kept(self) -> int:
        """Rows that stay in use."""
        return self.num_rows - len(self.dropped)

    def __str__(self) -> str:
        if not self.dropped:
            return f"{self.num_rows} {self.what}, none over {self.key}={self.limit}"
        named = ", ".join(f"{where} ({tokens} tokens)" for where, tokens in self.dropped[:NUM_NAMED])
        more = len(self.dropped) - NUM_NAMED
        rest = f" and {more} more" if more > 0 else ""
        return f"{self.num_rows} {self.what}, {len(self.dropped)} dropped as longer than {self.key}={self.limit}: {named}{rest}"


def keep_short(lengths: Sequence[int], wheres: Sequence[str], what: str, key: str, limit: int) -> tuple[list[int], DropReport]:
    """Indices with length <= limit, and the report of the others. Raises DataError if nothing is left."""
    kept = [i for i, length in enumerate(lengths) if length <= limit]
    dropped = tuple((where, length) for where, length in zip(wheres, lengths, strict=True) if length > limit)
    report = DropReport(what, key, limit, len(lengths), dropped)
    if not kept:
        raise DataError(f"nothing is left to use: {report}; the shortest has {min(lengths)} tokens, raise {key}")
    return kept, report

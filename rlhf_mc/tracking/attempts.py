"""The attempts that a run took, as output_dir/attempts.jsonl tells them, and the share of their time that became kept iterations."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Goodput:
    """kept_seconds: of the iterations that the run is made of.  all_seconds: of all attempts, from start to end or last sign of life."""

    kept_seconds: float
    all_seconds: float
    num_attempts: int

    @property
    def share(self) -> float:
        """Of the time, what became kept training; the rest is starting, work that was lost, and the end of the run."""
        return self.kept_seconds / self.all_seconds if self.all_seconds else 0.0

    def __str__(self) -> str:
        attempts = f"{self.num_attempts} attempt{'s' if self.num_attempts > 1 else ''}"
        return f"goodput: {self.share:.3f}; {self.kept_seconds:.0f} s of iterations that count, of {self.all_seconds:.0f} s in {attempts}"


class Attempts:
    """One line for the begin of each attempt, and one for its end if it had one. The file's time of change is the last sign of life."""

    def __init__(self, directory: Path) -> None:
        """Writes down that an attempt begins; of one before that ended without a word, when it was last alive."""
        self._path, self._metrics = directory / "attempts.jsonl", directory / "metrics.jsonl"
        if self._path.exists() and "ended" not in (self._lines() or [{}])[-1]:
            self._write({"ended": self._path.stat().st_mtime, "how": "no word"})
        self._write({"began": time.time()})

    def beat(self) -> None:
        """Still alive. From any thread."""
        with suppress(OSError):
            os.utime(self._path)

    def end(self, how: str) -> None:
        """The attempt is over."""
        self._write({"ended": time.time(), "how": how})

    def goodput(self) -> Goodput:
        """Up to now. Of an iteration with several lines in metrics.jsonl, the last one counts."""
        lines = self._lines()
        begins = [line["began"] for line in lines if "began" in line]
        ends = [line["ended"] for line in lines if "ended" in line]
        ends += [time.time()] * (len(begins) - len(ends))
        kept = {line["iteration"]: line.get("timing_s/step") or 0.0 for line in lines_of(self._metrics)}
        return Goodput(sum(kept.values()), sum(end - begin for begin, end in zip(begins, ends, strict=True)), len(begins))

    def _lines(self) -> list[dict]:
        return lines_of(self._path)

    def _write(self, line: dict[str, object]) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")


def lines_of(path: Path) -> list[dict]:
    """The objects of a .jsonl file; those lines that were written to their end. none where there is no file."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found

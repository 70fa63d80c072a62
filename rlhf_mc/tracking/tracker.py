"""The one place that rank 0 reports to: files, wandb, terminal. On other ranks every call returns at once."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from rlhf_mc.config import Settings
from rlhf_mc.recipe import to_yaml
from rlhf_mc.tracking.attempts import Attempts
from rlhf_mc.tracking.text import Comparison, SampleRow, SummaryTable, comparison_table, sample_table
from rlhf_mc.tracking.wandb_run import WandbRun, resolve_mode


class Tracker:
    """Writes a run down, in `trainer.output_dir`: config.yaml, metrics.jsonl, samples.jsonl, attempts.jsonl,
    summary.json, wandb.

    Use as a context manager, so that an error marks the wandb run as failed and its process ends.

    settings: the resolved ones, saved with the run; the sections trainer and wandb are read here.
    total: iterations of the whole run.  start: those already done; what the files say of later ones is dropped. None: the
    files are appended to, and of two lines in metrics.jsonl with the same iteration, the later one holds.
    wandb_run_id: of the run that goes on; None: the one in output_dir, or a new one.
    """

    def __init__(self, settings: Settings, rank: int, total: int, start: int | None = None, wandb_run_id: str | None = None) -> None:
        self.output_dir = Path(settings.trainer.output_dir)
        self._is_writer = rank == 0
        self._start_seconds = time.monotonic()
        self._last_iteration: int | None = None
        self._pending_samples: tuple[int, Sequence[SampleRow]] | None = None
        self._wandb: WandbRun | None = None
        self._bar: tqdm | None = None
        self._attempts: Attempts | None = None
        if self._is_writer:
            self._open(settings, total, start, wandb_run_id)

    def _open(self, settings: Settings, total: int, start: int | None, wandb_run_id: str | None) -> None:
        mode = resolve_mode(settings.wandb.mode)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        (self.output_dir / "config.yaml").write_text(to_yaml(settings), encoding="utf-8")
        if start is not None:
            for name in ("metrics.jsonl", "samples.jsonl"):
                _drop_lines(self.output_dir / name, start)
        self._attempts = Attempts(self.output_dir)
        self._metrics_file = open(self.output_dir / "metrics.jsonl", "a")
        self._summary = SummaryTable()
        if mode != "disabled":
            self._wandb = WandbRun(settings, mode, self.output_dir, wandb_run_id)
            self.say(f"wandb: {mode}, run {self._wandb.id}, {self._wandb.place}")
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=start or 0, unit="it", dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.finish(exit_code=0 if kind is None else 1)

    def beat(self) -> None:
        """The run is alive. From any thread."""
        if self._attempts is not None:
            self._attempts.beat()

    def goodput(self) -> None:
        """Says which share of the time, earlier attempts included, became iterations that count; sends it to wandb."""
        if self._attempts is not None:
            goodput = self._attempts.goodput()
            self.say(str(goodput))
            if self._wandb:
                self._wandb.summarise({"goodput": goodput.share, "attempts": goodput.num_attempts})

    @property
    def wandb_run_id(self) -> str | None:
        """Id of the wandb run; None on other ranks and where wandb is disabled."""
        return self._wandb.id if self._wandb else None

    def say(self, message: str) -> None:
        """Prints on rank 0, with the time since the start of the run before it."""
        if self._is_writer:
            minutes, seconds = divmod(time.monotonic() - self._start_seconds, 60)
            self._print(f"[{int(minutes):3d}:{seconds:04.1f}] {message}")

    def samples(self, iteration: int, rows: Sequence[SampleRow], show: bool = True) -> None:
        """Keeps samples of an iteration; call it before `log` of that iteration, which sends them to wandb as a table.

        `show` false leaves out the printed table.
        """
        if not self._is_writer:
            return
        self._check_rising(iteration)
        self._pending_samples = (iteration, tuple(rows))
        with open(self.output_dir / "samples.jsonl", "a") as file:
            for row in rows:
                file.write(_sample_line(iteration, row))
        if show and rows:
            self._print(sample_table(rows))

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of one iteration everywhere; once an iteration, with rising numbers (else ValueError).

        Values are whatever float() takes. NaN and infinity become null in metrics.jsonl, and are named under `nonfinite`.
        """
        if not self._is_writer:
            return
        self._check_rising(iteration)
        numbers = {name: value if type(value) is int else float(value) for name, value in metrics.items()}
        samples = self._take_samples(iteration)
        self._metrics_file.write(_metrics_line(iteration, numbers))
        self._metrics_file.flush()
        if self._wandb:
            self._wandb.log(iteration, numbers, samples)
        self._last_iteration = iteration
        for line in self._summary.lines(iteration, numbers):
            self._print(line)
        if self._bar is not None:
            self._bar.update(1)

    def before_and_after(self, title: str, rows: Sequence[Comparison]) -> str:
        """Ends a run: prints the table of what changed, writes summary.json, and returns the table."""
        table = comparison_table(title, rows)
        if self._is_writer:
            self._print(table)
            numbers = [(row.label, *map(_finite, (row.before, row.after, row.change))) for row in rows]
            records = [dict(zip(("label", "before", "after", "change"), row, strict=True)) for row in numbers]
            (self.output_dir / "summary.json").write_text(json.dumps({"title": title, "rows": records}, indent=2) + "\n")
        if self._wandb:
            self._wandb.summarise({f"before/{row.label}": row.before for row in rows if row.before is not None})
            self._wandb.summarise({f"after/{row.label}": row.after for row in rows if row.after is not None})
        return table

    def finish(self, exit_code: int = 0) -> None:
        """Closes files, bar and wandb run. A second call does nothing."""
        if not self._is_writer or self._metrics_file.closed:
            return
        self._metrics_file.close()
        self._attempts.end("done" if exit_code == 0 else "stopped")
        if self._bar is not None:
            self._bar.close()
        if self._wandb:
            self._wandb.finish(exit_code)

    def _take_samples(self, iteration: int) -> Sequence[SampleRow]:
        if self._pending_samples is None:
            return ()
        (of_iteration, rows), self._pending_samples = self._pending_samples, None
        if of_iteration != iteration:
            raise ValueError(f"samples of iteration {of_iteration} wait for its metrics, but those of iteration {iteration} came")
        return rows

    def _check_rising(self, iteration: int) -> None:
        if self._last_iteration is not None and iteration <= self._last_iteration:
            raise ValueError(f"iteration {iteration} after {self._last_iteration}: log each once, in order, its samples first")

    def _print(self, text: str) -> None:
        """To stdout; a progress bar on the same terminal is moved out of the way."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
            sys.stdout.flush()
        else:
            print(text, flush=True)


def _drop_lines(path: Path, start: int) -> None:
    """Keeps the lines of iterations before `start`; a line that was not written to its end goes too. The file is whole at any time."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    aside = path.with_suffix(".partial")
    aside.write_text("".join(line for line in lines if _iteration_of(line, start) < start), encoding="utf-8")
    aside.replace(path)


def _iteration_of(line: str, otherwise: int) -> int:
    try:
        return int(json.loads(line)["iteration"])
    except ValueError:
        return otherwise


def _metrics_line(iteration: int, metrics: Mapping[str, float]) -> str:
    record: dict[str, Any] = {"iteration": iteration, **{name: _finite(value) for name, value in metrics.items()}}
    if nonfinite := {name: str(value) for name, value in metrics.items() if not math.isfinite(value)}:
        record["nonfinite"] = nonfinite
    return json.dumps(record, allow_nan=False) + "\n"


def _sample_line(iteration: int, row: SampleRow) -> str:
    record = {
        "iteration": iteration,
        "prompt": row.prompt,
        "response": row.response,
        "score": _finite(row.score),
        "parts": {name: _finite(value) for name, value in row.parts.items()},
        "finish_reason": row.finish_reason,
    }
    return json.dumps(record, allow_nan=False) + "\n"


def _finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity: null stands for them."""
    return value if value is not None and math.isfinite(value) else None

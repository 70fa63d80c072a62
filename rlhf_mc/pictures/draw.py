"""The command: which pictures a run's directory has the data for, and the files that they become."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from rlhf_mc.config import ConfigError
from rlhf_mc.pictures.learning import learning, read_before, read_metrics
from rlhf_mc.pictures.theme import save
from rlhf_mc.pictures.timeline import read_trace, timeline

_TRACE = re.compile(r"rank(\d+)\.json")
#: Ranks of a timeline, where none are asked for.
_FIRST_RANKS = 4


def draw(run: Path, ranks: Sequence[int], target: Path, kind: str) -> Iterator[str]:
    """Draws what there is data for; for each picture a sentence: where it is, or why there is none.

    run: trainer.output_dir.  ranks: of the timeline; empty: the first four that left a trace.  target: the directory of the pictures.
    kind: svg or png.  Raises ConfigError where `run` is no directory of a run, or a picture cannot be written.
    """
    if not (run / "metrics.jsonl").is_file():
        raise ConfigError(f"{run}: it has no metrics.jsonl; name the trainer.output_dir of a run")
    yield _drawn(target / f"learning.{kind}", lambda: _learning(run))
    yield _drawn(target / f"timeline.{kind}", lambda: _timeline(run, ranks))


def _drawn(path: Path, figure: Callable[[], Figure]) -> str:
    try:
        made = figure()
    except ConfigError:
        raise
    except ValueError as error:
        return f"no {path.name}: {error}"
    try:
        save(made, path)
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be written: {error.strerror or error}; name another directory by --to") from None
    return str(path)


def _learning(run: Path) -> Figure:
    rows = read_metrics(run / "metrics.jsonl")
    if not rows:
        raise ValueError("metrics.jsonl has no iteration yet")
    return learning(rows, read_before(run / "summary.json"), f"{_name(run)}: {len(rows)} iterations")


def _timeline(run: Path, ranks: Sequence[int]) -> Figure:
    directory = run / "trace"
    found = sorted(int(name[1]) for path in directory.glob("*") if (name := _TRACE.fullmatch(path.name)))
    if not found:
        raise ValueError(f"{directory} has no trace; a PPO run leaves one at its end, unless trainer.trace_iterations is 0")
    if missing := set(ranks) - set(found):
        raise ConfigError(f"--ranks: {directory} has no trace of rank {min(missing)}; it has those of {', '.join(map(str, found))}")
    chosen = list(ranks) or found[:_FIRST_RANKS]
    traces = [read_trace(directory / f"rank{rank}.json", rank) for rank in chosen]
    return timeline(traces, f"{_name(run)}: an iteration on {len(chosen)} of {len(found)} ranks")


def _name(run: Path) -> str:
    """Of its directory, with the one around it: the programs of one recipe lie in one."""
    return "/".join(run.resolve().parts[-2:])

"""Whole rollout files: written aside, then renamed, so that a file with its name is complete; read with every count checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rlhf_mc.batch import Experience
from rlhf_mc.config import ConfigError
from rlhf_mc.rollout_files.lines import Header, Sample, assemble, header_line, parse_header, parse_sample, sample_lines

Parsed = TypeVar("Parsed")


class RolloutWriteError(RuntimeError):
    """A rollout file could not be written. The message names the file, the reason and the fix."""


def write_rollout(path: Path, header: Header, experience: Experience, decode: Callable[[list[int]], str]) -> None:
    """Writes the file at `path` with its folder, durably; a file of this name is replaced once the new one is complete.

    decode: the text of token ids. Raises RolloutWriteError, and leaves no part of a file, where the disk is full or
    refuses.
    """
    aside = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(aside, "wb") as file:
            file.write(header_line(header))
            file.writelines(sample_lines(experience, header.iteration, decode))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise RolloutWriteError(
            f"{path}: the rollout cannot be written: {error.strerror or error}; make room there, or name another trainer.output_dir"
        ) from error


def read_header(path: Path) -> Header:
    """The first line. Raises ConfigError for a file that cannot be read or is of another format or version."""
    return _read(path, samples=False)[0]


def read_rollout(path: Path) -> tuple[Header, Experience]:
    """What `write_rollout` wrote, to the same bits.

    Raises ConfigError that names file and line (from 1, the header) where a line is damaged, or where there are fewer or
    more samples than the header says.
    """
    header, samples = _read(path, samples=True)
    return header, assemble(samples)


def _read(path: Path, samples: bool) -> tuple[Header, list[Sample]]:
    try:
        with open(path, "rb") as file:
            header = _parsed(parse_header, file.readline(), path, 1)
            if not samples:
                return header, []
            found: list[Sample] = []
            for number, line in enumerate(file, start=2):
                found.append(_parsed(parse_sample, line, path, number))
                if fault := _disagreement(header, found):
                    raise ConfigError(f"{path}:{number}: {fault}")
    except OSError as error:
        raise ConfigError(f"{path}: the rollout cannot be read: {error.strerror or error}") from None
    if not found or len(found) < header.num_samples:
        raise ConfigError(f"{path}:{len(found) + 1}: the file ends after {len(found)} of its {header.num_samples} samples")
    return header, found


def _parsed(parse: Callable[[bytes], Parsed], line: bytes, path: Path, number: int) -> Parsed:
    try:
        return parse(line)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path}:{number}: the line is damaged: {error}") from None


def _disagreement(header: Header, samples: list[Sample]) -> str | None:
    """What the last of `samples` contradicts: the header, its place in the file, or the first sample."""
    last, place = samples[-1], len(samples) - 1
    if place >= header.num_samples:
        return f"one line more than the {header.num_samples} samples of the header"
    if (last.iteration, last.sample) != (header.iteration, place):
        return (
            f"iteration {last.iteration}, sample {last.sample} stands where iteration {header.iteration}, sample {place} belongs; "
            "a line is missing, or from another file"
        )
    if last.reward_parts.keys() != samples[0].reward_parts.keys():
        return f"reward_parts are {sorted(last.reward_parts)}, those of line 2 are {sorted(samples[0].reward_parts)}"
    return None

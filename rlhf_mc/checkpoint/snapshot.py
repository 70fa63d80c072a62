"""The directory of checkpoints on disk: 000002/, 000004/, ...; which are whole, which is the newest, and which go. No collective.

Each is named by the iterations that were done. It is written under another name, with a manifest of all its files, and renamed
when that is durable; so a directory with such a name was whole once. Whether it still is, the manifest's hashes say.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_mc.checkpoint.disk import HASHES, FileRecord, record_of, write_file, write_json
from rlhf_mc.models.whole_directory import flush

FORMAT = 3  # of 2, which is still read, the hash was SHA-256; of 1, layers were numbered within a pipeline stage
_NAME = re.compile(r"\d{6,}")
_PARTIAL = ".partial"
_MANIFEST, _RECORD, LATEST = "manifest.json", "run.json", "latest"


class DamagedError(ValueError):
    """A checkpoint is not what was saved. The message names the file."""


@dataclass(frozen=True)
class Snapshot:
    """A whole checkpoint. record: what is neither a tensor nor a rank's own, as it was handed to `saving.save`."""

    directory: Path
    record: dict[str, Any]

    @property
    def iteration(self) -> int:
        """Iterations that were done."""
        return int(self.directory.name)


def snapshot_path(root: Path, iteration: int) -> Path:
    """Where the checkpoint after so many iterations is."""
    return root / f"{iteration:06d}"


def aside_path(root: Path, iteration: int) -> Path:
    """Where it is while it is written."""
    return snapshot_path(root, iteration).with_suffix(_PARTIAL)


def published(root: Path) -> list[Path]:
    """All directories with the name of a checkpoint, the newest first."""
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()] if root.is_dir() else []
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def make_aside(root: Path, iteration: int) -> Path:
    """An empty directory to write a checkpoint in; what earlier attempts left behind is removed. Raises OSError."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"*{_PARTIAL}"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    aside = aside_path(root, iteration)
    aside.mkdir()
    return aside


def publish(aside: Path, record: dict[str, Any], files: Iterable[FileRecord]) -> None:
    """Turns a directory, in which `files` are durable, into a checkpoint, and then points `latest` to it.

    A damaged one of the same name is replaced. Raises CheckpointError or OSError; then it is a checkpoint, or is not there.
    """
    root, target = aside.parent, aside.with_suffix("")
    listed = [*files, write_json(aside / _RECORD, record)]
    write_json(aside / _MANIFEST, {"format": FORMAT, "files": [file._asdict() for file in listed]})
    flush(aside)
    if target.exists():
        _remove(target)
    os.rename(aside, target)
    flush(root)
    write_file(root / f"{LATEST}{_PARTIAL}", [f"{target.name}\n".encode()])
    os.replace(root / f"{LATEST}{_PARTIAL}", root / LATEST)
    flush(root)


def prune(root: Path, keep_last: int, keep_best: int = 0, best_by: str = "") -> None:
    """Removes all checkpoints that are older than the `keep_last` newest ones that are there in full length, but for the best ones.

    keep_best: how many of all that are there in full length are best.  best_by: trainer.best_by. Raises OSError.
    """
    whole = [path for path in published(root) if _has_all_bytes(path)]
    values = {path: value for path in whole if (value := _value_of(path, best_by)) is not None}
    best = sorted(values, key=values.__getitem__, reverse=True)[:keep_best]  # of equals, the newest
    kept = 0
    for path in published(root):
        if kept < keep_last:
            kept += path in whole
        elif path not in best:
            _remove(path)


def _value_of(path: Path, best_by: str) -> float | None:
    """By which checkpoints are compared; None where that metric was not measured when it was saved."""
    try:
        value = read_record(path).get("metrics", {}).get(best_by.removeprefix("-"))
    except DamagedError:
        return None
    return -value if value is not None and best_by.startswith("-") else value


def _remove(path: Path) -> None:
    """Takes its name away first: what is half removed is no checkpoint."""
    doomed = path.with_suffix(f".removed{_PARTIAL}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _has_all_bytes(path: Path) -> bool:
    try:
        return all((path / file.name).stat().st_size == file.num_bytes for file in read_manifest(path))
    except (DamagedError, OSError):
        return False


def read_manifest(path: Path) -> list[FileRecord]:
    """The files that a checkpoint must have. Raises DamagedError."""
    manifest = path / _MANIFEST
    content = _read_json(manifest)
    try:
        if content["format"] not in (2, FORMAT):
            raise DamagedError(f"{manifest}: its format is {content['format']}, this program reads {FORMAT} and 2")
        return [_file_record(file, content["format"]) for file in content["files"]]
    except (KeyError, TypeError, ValueError) as error:
        raise error if isinstance(error, DamagedError) else DamagedError(f"{manifest}: it is damaged") from None


def _file_record(file: dict[str, Any], written_as: int) -> FileRecord:
    algorithm, digest = ("sha256", file["sha256"]) if written_as == 2 else (file["algorithm"], file["digest"])
    if algorithm not in HASHES:
        raise DamagedError(f"{file['name']}: it was hashed by {algorithm}, this program knows {', '.join(HASHES)}")
    return FileRecord(str(file["name"]), int(file["num_bytes"]), str(digest), algorithm)


def read_record(path: Path) -> dict[str, Any]:
    """See Snapshot. Raises DamagedError."""
    return _read_json(path / _RECORD)


def fault_of(path: Path, expected: FileRecord) -> str | None:
    """What is wrong with a file of the checkpoint at `path`; None where it is what was saved. Reads all of it."""
    file = path / expected.name
    try:
        found = record_of(file, expected.algorithm)
    except OSError as error:
        return f"{file}: it cannot be read: {error.strerror or error}"
    if found.num_bytes != expected.num_bytes:
        return f"{file}: it has {found.num_bytes} bytes, {expected.num_bytes} were saved"
    if found.digest != expected.digest:
        digests = f"{found.algorithm} {found.digest[:12]}..., saved {expected.digest[:12]}..."
        return f"{file}: its content is not what was saved ({digests})"
    return None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise DamagedError(f"{file}: it cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise DamagedError(f"{file}: it is damaged: {error}") from None
    if not isinstance(content, dict):
        raise DamagedError(f"{file}: it is damaged: no mapping")
    return content

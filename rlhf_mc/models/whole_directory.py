"""A directory of a model on disk, which is whole or not there: it is written under another name, and renamed when all of it is durable.

No megatron-core, and no collective: that all ranks learn where one of them cannot write is World.together.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

_PARTIAL = ".partial"


class SaveError(RuntimeError):
    """A model could not be written. The message names the file or directory, the reason and the fix."""


def aside_path(target: Path) -> Path:
    """Where a directory is while it is written."""
    return target.with_name(f"{target.name}{_PARTIAL}")


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """Gives an empty directory to write in, which becomes `target` at the end; one that was there is replaced.

    After an error `target` is as it was, and nothing of the new one is left. Raises SaveError where the disk is full or refuses.
    """
    aside = begin_directory(target)
    try:
        with naming(aside):
            yield aside
        publish_directory(target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def begin_directory(target: Path) -> Path:
    """An empty directory beside `target` to write it in; what an earlier attempt left half written there goes. Raises SaveError."""
    aside = aside_path(target)
    with naming(aside):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    return aside


def publish_directory(target: Path) -> None:
    """Makes what was written aside durable, and then `target`. Raises SaveError."""
    aside, old = aside_path(target), target.with_name(f"{target.name}.removed{_PARTIAL}")
    with naming(aside):
        for path in (*aside.rglob("*"), aside):
            flush(path)
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)  # first, for what is half removed must not have its name
        aside.rename(target)
        flush(target.parent)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, what the disk refuses is a SaveError of the file that the error names, or of `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        named = getattr(error, "filename2", None) or getattr(error, "filename", None) or path
        reason = getattr(error, "strerror", None) or error
        raise SaveError(f"{named}: the model cannot be written: {reason}; make room there, or name another directory") from error


def flush(path: Path) -> None:
    """Makes a file durable, or the names in a directory: new ones, renamed ones, removed ones."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

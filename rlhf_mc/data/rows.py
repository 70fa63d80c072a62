"""Rows of JSONL and parquet files, each with the place it came from.

What the fields of a row mean is in `formats.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rlhf_mc.config import ConfigError


class DataError(ConfigError):
    """A data file or one of its rows cannot be used. The message names the file, the row and what is wrong.

    A ConfigError, because the user meets it like one: at start, on every rank, with the fix.
    """


@dataclass(frozen=True)
class Row:
    """One row. `where` is file:number, the line of a JSONL file or the row of a parquet file, from 1."""

    fields: dict[str, Any]
    where: str

    def get(self, *names: str) -> Any:
        """Value of the first of `names` that the row has, or None. A null is absent: parquet cannot leave a field out."""
        return next((self.fields[name] for name in names if self.fields.get(name) is not None), None)

    def missing(self, wanted: str) -> DataError:
        """The error for a row without the field(s) described by `wanted`."""
        present = ", ".join(name for name, value in self.fields.items() if value is not None) or "no field at all"
        return DataError(f"{self.where}: the row needs {wanted}; it has {present}")


def read_rows(paths: Sequence[str], key: str) -> list[Row]:
    """All rows of the files, in order. `key` is the setting that names the files, for errors.

    Raises DataError for no file, a missing or unreadable file, one without rows, or a line that is not a JSON object.
    """
    if not paths:
        raise DataError(f"{key}: no file is named; give a list of .jsonl or .parquet files")
    rows: list[Row] = []
    for path in paths:
        found = list(_read_file(path, key))
        if not found:
            raise DataError(f"{key}: '{path}' has no rows")
        rows += found
    return rows


def _read_file(path: str, key: str) -> Iterator[Row]:
    if not Path(path).is_file():
        raise DataError(f"{key}: there is no file '{path}'")
    suffix = Path(path).suffix
    if suffix in (".jsonl", ".json"):
        return _read_jsonl(path)
    if suffix == ".parquet":
        return _read_parquet(path)
    raise DataError(f"{key}: cannot read '{path}' by its ending; use .jsonl (or .json, one object a line) or .parquet")


def _read_jsonl(path: str) -> Iterator[Row]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where}: the line is not JSON: {error}") from error
            if not isinstance(fields, dict):
                raise DataError(f"{where}: the line holds a JSON {type(fields).__name__}; one object a line is needed")
            yield Row(fields, where)


def _read_parquet(path: str) -> Iterator[Row]:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(fields, f"{path}:{number}")
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: parquet cannot be read after row {number}: {error}") from error

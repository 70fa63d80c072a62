"""Files of a checkpoint: written through to the disk, and hashed on the way."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_DTYPES = {torch.float32: "F32"}
_READ_BYTES = 16 << 20


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The message names the file, the reason and the fix."""


class FileRecord(NamedTuple):
    """One file of a checkpoint, as its manifest lists it. sha256: in hexadecimal digits."""

    name: str
    num_bytes: int
    sha256: str


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """What `error` means for the user."""
    reason = error.strerror or error
    return CheckpointError(f"{path}: the checkpoint cannot be written: {reason}; make room there, or name another trainer.output_dir")


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """Writes `parts` one after the other, durably. Raises CheckpointError where the disk is full or refuses."""
    digest, num_bytes = hashlib.sha256(), 0
    try:
        with open(path, "wb") as file:
            for part in parts:
                file.write(part)
                digest.update(part)
                num_bytes += memoryview(part).nbytes
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from error
    return FileRecord(path.name, num_bytes, digest.hexdigest())


def write_json(path: Path, content: object) -> FileRecord:
    """Writes `content` as JSON, in which every float comes back to the same bits."""
    return write_file(path, [json.dumps(content, indent=1).encode()])


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Writes contiguous float32 tensors as a safetensors file, one by one: only of a tensor on a GPU there is a copy, while it is written.

    Raises CheckpointError.
    """
    return write_file(path, _safetensors(tensors, metadata))


def _safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The format: 8 bytes with the length of the header, the header in JSON, the values in its order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for tensor in tensors.values():
        yield memoryview(tensor.cpu().reshape(-1).view(torch.uint8).numpy())


def record_of(path: Path) -> FileRecord:
    """Reads a whole file. Raises OSError."""
    digest, num_bytes = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
            num_bytes += len(part)
    return FileRecord(path.name, num_bytes, digest.hexdigest())


def flush_directory(path: Path) -> None:
    """Makes the names in a directory durable: new ones, renamed ones, removed ones."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

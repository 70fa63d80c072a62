"""Files of a checkpoint: written through to the disk, hashed on the way, and read back.

Files are read by read(2), not mapped: where a disk fails, that is an OSError, and not the end of the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

#: By their names in manifests. Files are written with BLAKE3, which runs at several times SHA-256's rate on a core.
HASHES = {"blake3": blake3, "sha256": hashlib.sha256}
#: Threads of a rank that read: one waits for the disk while the other hashes, or two copy out of the page cache.
STREAMS = 2
_DTYPES = {torch.float32: "F32"}
#: Hashed while it is still in the core's cache. The kernel reads ahead of it.
_CHUNK_BYTES = 1 << 20
#: So many bytes at a time start on their way to the disk while the next are hashed; fsync alone would start all at the end.
_FLUSH_BYTES = 32 << 20


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The message names the file, the reason and the fix."""


class FileRecord(NamedTuple):
    """One file of a checkpoint, as its manifest lists it. digest: hexadecimal digits.  algorithm: a key of HASHES."""

    name: str
    num_bytes: int
    digest: str
    algorithm: str = "blake3"


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """What `error` means for the user."""
    reason = error.strerror or error
    return CheckpointError(f"{path}: the checkpoint cannot be written: {reason}; make room there, or name another trainer.output_dir")


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """Writes `parts` one after the other, durably. Raises CheckpointError where the disk is full or refuses."""
    digest, num_bytes, flushed = blake3(), 0, 0
    try:
        with open(path, "wb") as file:
            for chunk in _chunks(parts):
                file.write(chunk)
                digest.update(chunk)
                num_bytes += chunk.nbytes
                if num_bytes - flushed >= _FLUSH_BYTES:
                    # Linux begins to write dirty pages when it is told that they are not needed, and does not wait.
                    os.posix_fadvise(file.fileno(), flushed, num_bytes - flushed, os.POSIX_FADV_DONTNEED)
                    flushed = num_bytes
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from error
    return FileRecord(path.name, num_bytes, digest.hexdigest())


def _chunks(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part)
        for start in range(0, view.nbytes, _CHUNK_BYTES):
            yield view[start : start + _CHUNK_BYTES]


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


def read_tensors(path: Path, targets: Mapping[str, Tensor]) -> None:
    """Sets each target to the tensor of its name in a file of `write_tensors`; if it is contiguous on the host, without a copy.

    Raises ValueError where the file has no such tensor of the target's shape, OSError where it cannot be read.
    """
    with open(path, "rb") as file, ThreadPoolExecutor(STREAMS) as streams:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))

        def read(name: str) -> None:
            place, target = header.get(name, {}), targets[name]
            if (place.get("dtype"), place.get("shape")) != (_DTYPES[target.dtype], list(target.shape)):
                raise ValueError(f"{path}: it has no {name} of {tuple(target.shape)} in {target.dtype}, as this run has it")
            in_place = target.device.type == "cpu" and target.is_contiguous()
            values = target if in_place else torch.empty(target.shape)
            if not _fill(values, file.fileno(), 8 + length + place["data_offsets"][0]):
                raise ValueError(f"{path}: it ends within {name}")
            if not in_place:
                target.detach().copy_(values)  # no_grad holds in the caller's thread only

        for _ in streams.map(read, targets):
            pass


def _fill(values: Tensor, file: int, offset: int) -> bool:
    """Reads a contiguous tensor on the host from an open file; whether the file has all of it."""
    # By address: a NumPy view would forbid for good that the memory is freed, as offload does.
    buffer = memoryview((ctypes.c_char * values.nbytes).from_address(values.data_ptr())).cast("B")
    done = 0
    while done < len(buffer) and (count := os.preadv(file, [buffer[done:]], offset + done)):
        done += count
    return done == len(buffer)


def record_of(path: Path, algorithm: str) -> FileRecord:
    """Reads a whole file. Raises OSError."""
    digest, num_bytes = HASHES[algorithm](), 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            num_bytes += count
    return FileRecord(path.name, num_bytes, digest.hexdigest(), algorithm)

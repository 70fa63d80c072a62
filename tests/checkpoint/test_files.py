"""Files of a checkpoint without ranks: what is written comes back, and no byte of any file can change or be lost without being seen."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from rlhf_mc.checkpoint import disk
from rlhf_mc.checkpoint.disk import FileRecord, read_tensors, record_of, write_file, write_tensors
from rlhf_mc.checkpoint.snapshot import DamagedError, fault_of, make_aside, publish, read_manifest

CHUNK = 1 << 10


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(disk, "_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(disk, "_FLUSH_BYTES", 3 * CHUNK)


def content(num_bytes: int) -> bytes:
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes)).numpy().tobytes()


def tensors() -> dict[str, torch.Tensor]:
    """Over several chunks, a scalar, and nothing at all."""
    return {"a": torch.randn(37, 101), "step": torch.tensor(7.0), "none": torch.empty(0, 5), "b": torch.randn(3 * CHUNK)}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    aside = make_aside(tmp_path, 2)
    files = [write_tensors(aside / "rank00000.actor.safetensors", tensors(), {}), write_file(aside / "rank00000.json", [content(CHUNK)])]
    publish(aside, {"iteration": 2}, files)
    return tmp_path / "000002"


def rewrite_as_format_2(checkpoint: Path) -> None:
    listed = [(file.name, file.num_bytes, record_of(checkpoint / file.name, "sha256").digest) for file in read_manifest(checkpoint)]
    files = [{"name": name, "num_bytes": num_bytes, "sha256": digest} for name, num_bytes, digest in listed]
    (checkpoint / "manifest.json").write_text(json.dumps({"format": 2, "files": files}))


@pytest.mark.parametrize("sizes", [[], [0], [1], [CHUNK], [CHUNK + 1, 5, 0, 7 * CHUNK - 1]], ids=str)
def test_parts_are_written_in_order_and_hashed_as_one(tmp_path, sizes):
    parts = [content(size) for size in sizes]
    whole = b"".join(parts)
    record = write_file(tmp_path / "file", (memoryview(part) for part in parts))
    assert (tmp_path / "file").read_bytes() == whole
    assert record == FileRecord("file", len(whole), blake3(whole).hexdigest(), "blake3") == record_of(tmp_path / "file", "blake3")
    assert record_of(tmp_path / "file", "sha256").digest == hashlib.sha256(whole).hexdigest()


def test_tensors_come_back_into_the_memory_that_is_there(tmp_path):
    saved = tensors()
    write_tensors(tmp_path / "file", saved, {"of": "text"})
    targets = {name: torch.full_like(tensor, torch.nan) for name, tensor in reversed(saved.items())}
    targets["a"] = torch.full((101, 37), torch.nan).t()
    addresses = {name: target.data_ptr() for name, target in targets.items()}
    read_tensors(tmp_path / "file", targets)
    assert all(torch.equal(targets[name], saved[name]) and targets[name].data_ptr() == addresses[name] for name in saved)
    assert targets["b"].untyped_storage().resizable(), "offload could not free it any more"


def test_tensors_of_another_shape_or_file_are_refused(tmp_path):
    path = tmp_path / "file"
    write_tensors(path, tensors(), {})
    for name, target in (("a", torch.empty(101, 37)), ("c", torch.empty(1))):
        with pytest.raises(ValueError, match=rf"file: it has no {name} of \("):
            read_tensors(path, {name: target})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="file: it ends within b"):
        read_tensors(path, {"b": torch.empty(3 * CHUNK)})


@pytest.mark.parametrize("written_as", [2, 3])
def test_a_byte_flipped_or_lost_anywhere_is_seen(checkpoint, written_as):
    if written_as == 2:
        rewrite_as_format_2(checkpoint)
    files = read_manifest(checkpoint)
    assert sorted(file.name for file in files) == ["rank00000.actor.safetensors", "rank00000.json", "run.json"]
    assert {file.algorithm for file in files} == {"sha256" if written_as == 2 else "blake3"}
    for file in files:
        path = checkpoint / file.name
        whole = path.read_bytes()
        assert fault_of(checkpoint, file) is None
        edges = {edge + off for edge in range(0, len(whole), CHUNK) for off in (-1, 0)} & set(range(len(whole)))
        for place in sorted({len(whole) // 2, len(whole) - 1} | edges):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            assert "its content is not what was saved" in fault_of(checkpoint, file), place
            path.write_bytes(whole[:place])
            assert fault_of(checkpoint, file).endswith(f"it has {place} bytes, {len(whole)} were saved")
        path.write_bytes(whole + b"\0")
        assert fault_of(checkpoint, file).endswith(f"it has {len(whole) + 1} bytes, {len(whole)} were saved")
        path.unlink()
        assert fault_of(checkpoint, file) == f"{path}: it cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda manifest: manifest.update(format=4), "its format is 4, this program reads 3 and 2"),
        (lambda manifest: manifest.update(format=1), "its format is 1, this program reads 3 and 2"),
        (lambda manifest: manifest["files"][0].update(algorithm="md5"), "was hashed by md5, this program knows blake3, sha256"),
        (lambda manifest: manifest["files"][0].pop("algorithm"), "it is damaged"),
        (lambda manifest: manifest["files"][0].pop("digest"), "it is damaged"),
    ],
    ids=["newer", "older", "unknown-hash", "no-hash", "no-digest"],
)
def test_a_manifest_that_this_program_cannot_check_is_refused(checkpoint, change, message):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    change(manifest)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedError, match=message):
        read_manifest(checkpoint)

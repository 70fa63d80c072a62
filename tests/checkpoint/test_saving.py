"""Checkpoints on disk, over ranks: only whole ones are found, the newest first; a failing writer leaves the older ones as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Layout

DP2 = Layout(data=2)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def saved(ranks, root: Path, *iterations: int, **options) -> list[list[str]]:
    return [ranks.run("checkpoint.on_ranks:save_bytes", DP2, root=str(root), iteration=i, **options) for i in iterations]


def found(ranks, root: Path, **options) -> list:
    """Alike on all ranks."""
    first, second = ranks.run("checkpoint.on_ranks:found", DP2, root=str(root), **options)
    assert first == second
    return first


def test_nothing_there_is_the_beginning(ranks, tmp_path):
    assert found(ranks, tmp_path / "none") == (0, {}, ())


def test_the_last_ones_stay_and_the_newest_is_found(ranks, tmp_path):
    root = tmp_path / "checkpoints"
    assert saved(ranks, root, 2, 4, 6, 8) == [["", ""]] * 4
    assert names(root) == ["000006", "000008", "latest"]
    assert (root / "latest").read_text() == "000008\n"
    assert names(root / "000008") == ["manifest.json", "rank0", "rank1", "run.json"]
    (root / "latest").write_text("000002\n")  # stale: what counts is what is there
    iteration, record, messages = found(ranks, root)
    assert (iteration, record) == (8, {"iteration": 8})
    assert messages == (f"resumes from {root}/000008: 8 of 100 iterations are done",)
    assert found(ranks, root, iterations=8)[2][0].startswith("nothing is left to train: all 8 iterations are done")
    assert found(ranks, root, resume="never").startswith(f"trainer.resume: never, but {root} holds checkpoints of a run")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "flipped": (flip, "rank1", "its content is not what was saved"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "rank0", "bytes, 100011 were saved"),
    "missing": (Path.unlink, "rank1", "it cannot be read: No such file"),
    "record": (flip, "run.json", "its content is not what was saved"),
    "manifest": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "manifest.json", "it is damaged"),
    "no-manifest": (Path.unlink, "manifest.json", "it cannot be read: No such file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_skipped_and_its_file_named(ranks, tmp_path, damage):
    harm, file, message = DAMAGES[damage]
    saved(ranks, tmp_path, 2, 4)
    harm(tmp_path / "000004" / file)
    iteration, record, messages = found(ranks, tmp_path)
    assert (iteration, record) == (2, {"iteration": 2})
    assert messages[0].startswith(f"the checkpoint {tmp_path}/000004 is damaged and skipped: {tmp_path}/000004/{file}: ")
    assert message in messages[0] and messages[1].startswith(f"resumes from {tmp_path}/000002")
    saved(ranks, tmp_path, 4, keep_last=1)
    assert found(ranks, tmp_path)[0] == 4 and names(tmp_path) == ["000004", "latest"]


def test_every_file_is_read_by_fewer_ranks_than_wrote_it(ranks, tmp_path):
    ranks.run("checkpoint.on_ranks:save_bytes", Layout(data=3), root=str(tmp_path), iteration=2)
    for file in ("rank0", "rank1", "rank2"):
        flip(tmp_path / "000002" / file)
        assert f"{file}: its content is not what was saved" in found(ranks, tmp_path)
        flip(tmp_path / "000002" / file)
    assert found(ranks, tmp_path)[0] == 2


def test_one_that_lost_bytes_does_not_count_among_those_that_stay(ranks, tmp_path):
    saved(ranks, tmp_path, 2, 4)
    (tmp_path / "000004/rank0").unlink()
    saved(ranks, tmp_path, 6)
    assert names(tmp_path) == ["000002", "000004", "000006", "latest"]


def test_where_none_is_whole_the_run_does_not_begin_anew(ranks, tmp_path):
    saved(ranks, tmp_path, 2)
    flip(tmp_path / "000002/rank0")
    assert found(ranks, tmp_path).startswith("trainer.resume: auto, but no checkpoint is whole")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_stops_all_and_leaves_the_old_one(ranks, tmp_path, rank):
    saved(ranks, tmp_path, 2)
    (errors,) = saved(ranks, tmp_path, 4, keep_last=1, full_disk_of=rank)
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"rank {rank}: {tmp_path}/000004.partial/rank{rank}: the checkpoint cannot be written: No space left")
    assert names(tmp_path) == ["000002", "latest"] and found(ranks, tmp_path)[0] == 2


def test_a_directory_that_cannot_be_made_stops_all(ranks, tmp_path):
    (tmp_path / "file").touch()
    (errors,) = saved(ranks, tmp_path / "file" / "checkpoints", 2)
    assert errors[0] == errors[1] and "rank 0:" in errors[0] and "Not a directory" in errors[0]


def test_what_a_killed_run_left_half_written_is_no_checkpoint(ranks, tmp_path):
    saved(ranks, tmp_path, 2)
    (tmp_path / "000004.partial").mkdir()
    (tmp_path / "000004.partial/rank0").write_bytes(b"half")
    assert found(ranks, tmp_path)[0] == 2
    saved(ranks, tmp_path, 6)
    assert names(tmp_path) == ["000002", "000006", "latest"]


@pytest.mark.parametrize(("best_by", "stay"), [("val/x", ["000002", "000004", "000012"]), ("-val/x", ["000006", "000008", "000012"])])
def test_the_best_ones_stay_beside_the_last(ranks, tmp_path, best_by, stay):
    """000010 has no value; of equals the newer one stays; what a restarted run finds on the disk counts."""
    values = {2: 5.0, 4: 7.0, 6: 1.0, 8: 1.0, 10: None, 12: 3.0}
    for iteration, value in values.items():
        saved(ranks, tmp_path, iteration, keep_last=1, keep_best=2, best_by=best_by, value=value)
    assert names(tmp_path) == [*stay, "latest"]
    (tmp_path / stay[1] / "rank0").unlink()
    saved(ranks, tmp_path, 14, keep_last=1, keep_best=2, best_by=best_by, value=3.0)
    assert names(tmp_path) == [stay[0], "000014", "latest"], "a damaged one is none of the best"
    assert found(ranks, tmp_path)[0] == 14

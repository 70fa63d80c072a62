"""A rollout file gives back the bits that went in; a damaged one is refused with its name and line; a full disk leaves none."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from rollout_files.experiences import SPECIAL, example, experiences, letters, of_bits, same_bits, written

from rlhf_mc.batch import Experience
from rlhf_mc.config import ConfigError
from rlhf_mc.rollout_files import Header, RolloutWriteError, read_header, read_rollout, write_rollout


@given(experience=experiences())
def test_every_bit_of_any_experience_comes_back(experience, tmp_path_factory):
    path = written(tmp_path_factory.getbasetemp() / "any.jsonl", experience, iteration=7, kl_coef=0.1 + 0.2)
    header, found = read_rollout(path)
    assert same_bits(found, experience)
    assert header == Header(7, len(experience), 0.1 + 0.2, {}) == read_header(path)


def test_long_lists_of_finite_numbers_come_back(tmp_path):
    """They are written on a way of their own; here are all exponents and both signs, and both zeros."""
    patterns = torch.randint(-(2**31), 2**31, (20_000,), generator=torch.Generator().manual_seed(1)).int()
    values = patterns.view(torch.float32)
    values = torch.cat([values[values.isfinite()], of_bits([bits for bits in SPECIAL if bits & 0x7F800000 != 0x7F800000])])
    num = values.numel()
    rollout = replace(
        example().rollout,
        tokens=torch.arange(num + 3),
        response_lengths=torch.tensor([num, 0]),
        rollout_logprobs=values,
    )
    names = ("old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")
    experience = replace(example(), rollout=rollout, loss_mask=values > 0, **dict.fromkeys(names, values))
    assert same_bits(read_rollout(written(tmp_path / "long", experience))[1], experience)


def test_a_line_reads_like_a_sample(tmp_path):
    path = written(tmp_path / "new" / "000000.jsonl", settings={"rollout.temperature": 0.7})
    header, first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert header == {
        "format": "rlhf_mc rollout", "version": 1, "iteration": 0, "num_samples": 2, "kl_coef": 0.05,
        "settings": {"rollout.temperature": 0.7},
    }  # fmt: skip
    assert first | {"old_logprobs": [], "ref_logprobs": [], "values": [], "rollout_logprobs": []} == {
        "iteration": 0, "sample": 0, "group": 0, "row": {"prompt": "a", "answer": 1}, "prompt": "EF", "response": "GHB",
        "stop_reason": "stop", "truncated": False, "score": 1.0, "reward_parts": {"exact": 1.0},
        "prompt_ids": [5, 6], "response_ids": [7, 8, 2], "loss_mask": [True, False, True],
        "rewards": [0.0, -0.0, 1.0], "advantages": [0.5, None, "0x7f800000"], "returns": [1.0, 1.0, 1.0],
        "rollout_logprobs": [], "old_logprobs": [], "ref_logprobs": [], "values": [],
    }  # fmt: skip
    assert second["response_ids"] == second["values"] == [] and second["reward_parts"] == {"exact": None}


def test_what_only_parquet_holds_becomes_text(tmp_path):
    row = {"day": datetime.date(2026, 1, 2), "raw": b"x", "far": float("inf"), "list": [{"at": datetime.time(3)}], "text": "\ud800"}
    experience = example()
    path = written(tmp_path / "f", replace(experience, rollout=replace(experience.rollout, rows=[row, {}])))
    expected = {"day": "2026-01-02", "raw": "b'x'", "far": "inf", "list": [{"at": "03:00:00"}], "text": "\ud800"}
    assert read_rollout(path)[1].rollout.rows == [expected, {}]


# ---- damaged files


def changed(path: Path, line: int, **values: object) -> None:
    """Line `line` (from 1) with other values of some fields; ... takes a field out."""
    lines = path.read_text().splitlines()
    fields = {name: value for name, value in (json.loads(lines[line - 1]) | values).items() if value is not ...}
    lines[line - 1] = json.dumps(fields)
    path.write_text("\n".join(lines) + "\n")


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_rollout(path)
    return str(caught.value)


@pytest.mark.parametrize(
    "line, values, message",
    [
        (1, {"version": 2}, "version 2; this program reads 'rlhf_mc rollout', version 1"),
        (1, {"version": ...}, "the field version is missing"),
        (1, {"num_samples": ...}, "the field num_samples is missing"),
        (1, {"kl_coef": "0.05"}, "kl_coef is str, not float"),
        (1, {"iteration": 1}, None),
        (2, {"sample": 1}, "iteration 0, sample 1 stands where iteration 0, sample 0 belongs"),
        (3, {"iteration": 4}, "iteration 4, sample 1 stands where iteration 0, sample 1 belongs"),
        (3, {"score": ...}, "the field score is missing"),
        (2, {"score": True}, "score[0]: True is no number"),
        (2, {"truncated": 0}, "truncated is int, not bool"),
        (2, {"values": [0.5, 0.5]}, "values has 2 items for 3 response_ids"),
        (2, {"response_ids": [7, 8]}, "rollout_logprobs has 3 items for 2 response_ids"),
        (2, {"response_ids": [7, -8, 2]}, "response_ids[1]: -8 is no token id"),
        (2, {"prompt_ids": [7, 8.0]}, "prompt_ids[1]: 8.0 is no token id"),
        (2, {"prompt_ids": []}, "prompt_ids is empty"),
        (2, {"loss_mask": [1, 0, 1]}, "loss_mask holds something else than true and false"),
        (2, {"returns": [0.5, 0.1, 0.5]}, "returns[1]: 0.1 is no float32 number"),
        (2, {"returns": [0.5, 1e300, 0.5]}, "returns[1]: 1e+300 is no float32 number"),
        (2, {"returns": [0.5, 10**400, 0.5]}, "too large"),
        (2, {"returns": [0.5, "inf", 0.5]}, "returns[1]: 'inf' is no number, null or bits like '0x7f800000'"),
        (2, {"returns": [0.5, float("nan"), 0.5]}, "NaN is not JSON"),
        (3, {"reward_parts": {"other": 1.0}}, "reward_parts are ['other'], those of line 2 are ['exact']"),
    ],
)  # fmt: skip
def test_a_damaged_line_is_named(tmp_path, line, values, message):
    path = written(tmp_path / "000000.jsonl")
    changed(path, line, **values)
    named = line if message else 2  # an iteration of the header that no sample has shows at the first of them
    assert refused(path).startswith(f"{path}:{named}: ") and (message or "stands where iteration 1") in refused(path)


@pytest.mark.parametrize("num_bytes", range(0, 2_000, 37))
def test_a_file_cut_anywhere_is_refused(tmp_path, num_bytes):
    path = written(tmp_path / "000000.jsonl")
    whole = path.read_bytes()
    num_bytes = min(num_bytes, len(whole) - 2)
    path.write_bytes(whole[:num_bytes])
    line = whole[:num_bytes].count(b"\n") + 1
    assert refused(path).startswith((f"{path}:{line}: the line is damaged", f"{path}:{line - 1}: the file ends after {line - 2} of its 2"))


def test_lines_that_are_no_json_or_too_many(tmp_path):
    path = written(tmp_path / "000000.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines(keepends=True)[2])
    assert refused(path) == f"{path}:4: one line more than the 2 samples of the header"
    for line in (b"\n", b"[]\n", b"\xff\n", b"[" * 100_000 + b"\n"):
        path.write_bytes(whole + line)
        assert refused(path).startswith(f"{path}:4: the line is damaged: ")
    path.unlink()
    assert refused(path) == f"{path}: the rollout cannot be read: No such file or directory"


# ---- a disk that does not take it


def write(path: Path, experience: Experience) -> None:
    write_rollout(path, Header(0, len(experience), 0.05, {}), experience, letters)


def test_a_full_disk_is_named_and_leaves_the_old_file(tmp_path):
    path = written(tmp_path / "000000.jsonl")
    before = path.read_bytes()
    (tmp_path / "000000.jsonl.partial").symlink_to("/dev/full")
    with pytest.raises(RolloutWriteError, match="000000.jsonl: the rollout cannot be written: No space left on device; make room"):
        write(path, example())
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "rollouts").write_text("a file")
    with pytest.raises(RolloutWriteError, match="rollouts/000000.jsonl: the rollout cannot be written"):
        write(tmp_path / "rollouts" / "000000.jsonl", example())

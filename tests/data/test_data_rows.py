"""Reading files: what arrives, and what a bad file is called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rlhf_mc.config import ConfigError
from rlhf_mc.data import DataError, Row, read_rows


def test_jsonl_keeps_fields_and_counts_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a\\u2028b", "extra": [1, {"x": null}]}\n\n{"prompt": "é"}\n', encoding="utf-8")
    rows = read_rows([str(path)], "data.train")
    assert [row.fields for row in rows] == [{"prompt": "a\u2028b", "extra": [1, {"x": None}]}, {"prompt": "é"}]
    assert [row.where for row in rows] == [f"{path}:1", f"{path}:3"]


def test_parquet_gives_plain_lists_and_dicts(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    fields = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": str(i)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i},
        }
        for i in range(5)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(fields), path, row_group_size=2)
    rows = read_rows([path], "data.train")
    assert [row.fields for row in rows] == fields
    assert [row.where for row in rows] == [f"{path}:{i}" for i in range(1, 6)]


def test_files_follow_each_other(write_jsonl: Callable[..., str]) -> None:
    paths = [write_jsonl([{"i": 1}], "one.jsonl"), write_jsonl([{"i": 2}], "two.jsonl")]
    assert [row.fields["i"] for row in read_rows(paths, "data.train")] == [1, 2]


def test_no_file_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.train: no file is named"):
        read_rows([], "data.train")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.validation: there is no file '.*nowhere\.jsonl'"):
        read_rows([str(tmp_path / "nowhere.jsonl")], "data.validation")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty_jsonl(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"data\.train: '.*empty\.jsonl' has no rows"):
        read_rows([str(path)], "data.train")


def test_empty_parquet(tmp_path: Path) -> None:
    path = str(tmp_path / "empty.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(DataError, match="has no rows"):
        read_rows([path], "data.train")


def test_unknown_ending(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt\n1\n")
    with pytest.raises(DataError, match=r"rows\.csv.*use \.jsonl"):
        read_rows([str(path)], "data.train")


@pytest.mark.parametrize(
    ("line", "message"), [(b"{oops}", "line is not JSON"), (b"[1]", "holds a JSON list"), (b'{"a": "\xff"}', "line is not JSON")]
)
def test_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"bad\.jsonl:2: .*{message}"):
        read_rows([str(path)], "data.train")


def test_broken_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    path.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"bad\.parquet: parquet cannot be read"):
        read_rows([str(path)], "data.train")


def test_a_null_field_is_absent() -> None:
    row = Row({"prompt": None, "question": "q", "id": 3}, "f.jsonl:7")
    assert row.get("prompt", "question") == "q"
    assert str(row.missing("'text'")) == "f.jsonl:7: the row needs 'text'; it has question, id"

"""wandb: a real offline run, its files read back; mode, key and run id."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_mc.config import ConfigError
from rlhf_mc.tracking.wandb_run import kept_run_id, resolve_mode

from .programs import run_program

KEY_LIKE = "0123456789abcdef" * 3


def wandb_records(path: Path) -> Iterator:
    """Records of a .wandb file: after 7 bytes of head, a LevelDB log (blocks of 32 KiB, chunks with crc, length, type)."""
    from wandb.proto import wandb_internal_pb2

    data, position, record = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def history_of(path: Path) -> list[dict]:
    """One dict for each logging call, as wandb stored it; keys inside a value are joined to its name by slashes."""
    rows = [record.history for record in wandb_records(path) if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output directory of one offline run with two lifetimes, written by a program of its own: steps 1 and 2, then step 3
    and an error. A key is in its environment, so that a test can look for it."""
    output_dir = tmp_path_factory.mktemp("offline") / "run"
    program = f"""
from contextlib import suppress
from rlhf_mc.config import Settings, Trainer, Wandb
from rlhf_mc.tracking import Comparison, SampleRow, Tracker
wandb = Wandb(mode="offline", project="our_project", name="our_name", group="our_group", tags=["a", "b"])
settings = Settings(trainer=Trainer(output_dir={str(output_dir)!r}, seed=77), wandb=wandb)
for iterations in ([1, 2], [3]):
    with suppress(RuntimeError), Tracker(settings, rank=0, total=3) as tracker:
        for i in iterations:
            if i == 2:
                tracker.samples(i, [SampleRow("2 + 2 =", " 4", 1.5, {{"exact": 1.0}}, "stop")])
            tracker.log(i, {{"actor/pg_loss": 0.5 * i, "critic/score/mean": float("nan") if i == 3 else 1.0}})
        tracker.before_and_after("end", [Comparison("accuracy", 0.25, 0.75)])
        if i == 3:
            raise RuntimeError("out of luck")
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = run_program(program, environment | {"WANDB_API_KEY": KEY_LIKE})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    (output_dir / "stdout.txt").write_text(done.stdout)
    return output_dir


@pytest.fixture(scope="module")
def run_files(offline_run: Path) -> list[Path]:
    """The .wandb files of both lifetimes, in the order of their first step."""
    return sorted(offline_run.glob("wandb/offline-run-*/*.wandb"), key=lambda path: history_of(path)[0]["_step"])


def test_wandb_keeps_one_run_id_over_two_lifetimes(offline_run: Path, run_files: list[Path]) -> None:
    runs = [record.run for path in run_files for record in wandb_records(path) if record.WhichOneof("record_type") == "run"]
    kept = (offline_run / "wandb_run_id").read_text().strip()
    assert len(run_files) == 2 and {run.run_id for run in runs} == {kept}
    assert all(run.project == "our_project" and run.display_name == "our_name" for run in runs)
    assert all(run.run_group == "our_group" and list(run.tags) == ["a", "b"] for run in runs)


def test_wandb_holds_the_resolved_config(run_files: list[Path]) -> None:
    run = next(record.run for record in wandb_records(run_files[0]) if record.WhichOneof("record_type") == "run")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["trainer"]["seed"] == 77 and config["wandb"]["group"] == "our_group"


def test_wandb_gets_one_call_a_step_with_rising_steps(run_files: list[Path]) -> None:
    rows = [row for path in run_files for row in history_of(path)]
    assert [row["_step"] for row in rows] == [1, 2, 3]
    assert [row["actor/pg_loss"] for row in rows] == [0.5, 1.0, 1.5]
    assert rows[0]["critic/score/mean"] == 1.0 and math.isnan(rows[2]["critic/score/mean"])


def test_wandb_gets_the_samples_as_a_table_of_their_step(run_files: list[Path]) -> None:
    rows = history_of(run_files[0])
    assert "samples/path" not in rows[0] and rows[1]["samples/_type"] == "table-file"
    table = json.loads((run_files[0].parent / "files" / rows[1]["samples/path"]).read_text())
    assert table["columns"] == ["prompt", "response", "score", "exact", "finish_reason"]
    assert table["data"] == [["2 + 2 =", " 4", 1.5, 1.0, "stop"]]


def test_wandb_summary_has_before_and_after(run_files: list[Path]) -> None:
    summaries = [r.summary for r in wandb_records(run_files[1]) if r.WhichOneof("record_type") == "summary"]
    values = {item.key: json.loads(item.value_json) for summary in summaries for item in summary.update}
    assert (values["before/accuracy"], values["after/accuracy"]) == (0.25, 0.75)


def test_wandb_is_quiet(offline_run: Path) -> None:
    """Of wandb there is one line for each lifetime, ours, with the place to sync from."""
    about_wandb = [line for line in (offline_run / "stdout.txt").read_text().splitlines() if "wandb" in line]
    assert len(about_wandb) == 2 and all("wandb: offline, run" in line and "offline-run-" in line for line in about_wandb)


def test_wandb_marks_a_run_that_raised_as_failed(run_files: list[Path]) -> None:
    exits = [r.exit.exit_code for path in run_files for r in wandb_records(path) if r.WhichOneof("record_type") == "exit"]
    assert exits == [0, 1]


def test_the_api_key_is_nowhere_in_the_run(offline_run: Path) -> None:
    files = [path for path in offline_run.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if KEY_LIKE.encode() in path.read_bytes()] == []


def test_auto_mode_is_online_only_with_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve_mode("auto") == "offline"
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {KEY_LIKE}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert resolve_mode("auto") == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert resolve_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", KEY_LIKE)
    assert (resolve_mode("auto"), resolve_mode("offline"), resolve_mode("disabled")) == ("online", "offline", "disabled")


def test_online_without_a_key_is_an_error_that_names_the_fix() -> None:
    with pytest.raises(ConfigError, match="wandb.mode: online.*WANDB_API_KEY"):
        resolve_mode("online")


def test_run_id_is_made_once(tmp_path: Path) -> None:
    assert kept_run_id(tmp_path) == kept_run_id(tmp_path)
    assert kept_run_id(tmp_path) == (tmp_path / "wandb_run_id").read_text().strip()
    (tmp_path / "wandb_run_id").write_text("chosen\n")
    assert kept_run_id(tmp_path) == kept_run_id(tmp_path, "of a checkpoint") == "chosen"
    (tmp_path / "wandb_run_id").unlink()
    assert kept_run_id(tmp_path, "of a checkpoint") == kept_run_id(tmp_path) == "of a checkpoint"

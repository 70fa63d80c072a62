"""A checkpoint of another run is refused with keys and values; what does not change a run may change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ranks import Layout

from rlhf_mc.checkpoint import Snapshot, check_same_run, settings_record
from rlhf_mc.config import Actor, ConfigError, Medusa, Optim, Parallel, Settings, Trainer, Wandb

SETTINGS = Settings(trainer=Trainer(seed=1, iterations=10), actor=Actor(path="/models/a"))
IDENTITY = {"actor.path": "a" * 64, "data.train": "b" * 64}
SAVED = Snapshot(Path("/run/checkpoints/000002"), {"settings": settings_record(SETTINGS), "identity": IDENTITY})


def test_the_same_run_goes_on():
    check_same_run(SAVED, SETTINGS, IDENTITY)


@pytest.mark.parametrize(
    "changed",
    [
        replace(SETTINGS, trainer=replace(SETTINGS.trainer, output_dir="elsewhere", save_every=3, keep_last=9, evaluate_every=1)),
        replace(SETTINGS, actor=Actor(path="/moved/a")),
        replace(SETTINGS, wandb=Wandb(project="other"), parallel=Parallel(tensor=2, distributed_optimizer=False)),
    ],
)
def test_what_may_change(changed):
    check_same_run(SAVED, changed, IDENTITY)


def test_every_contradiction_is_named_with_both_values():
    changed = replace(SETTINGS, trainer=replace(SETTINGS.trainer, seed=2), medusa=Medusa(enabled=True, num_heads=5))
    with pytest.raises(ConfigError) as error:
        check_same_run(SAVED, changed, IDENTITY | {"data.train": "c" * 64})
    assert str(error.value).splitlines() == [
        "trainer.resume: auto, but the checkpoint /run/checkpoints/000002 is of another run; set these keys back, or name another "
        "trainer.output_dir:",
        "  trainer.seed: 2, but saved with 1",
        "  medusa.enabled: true, but saved with false",
        "  medusa.num_heads: 5, but saved with 3",
        "  data.train: its files (sha256 cccccccccccc...) are not those of the saved run (bbbbbbbbbbbb...)",
    ]


def test_a_run_may_become_longer_where_no_rate_depends_on_its_length():
    longer = replace(SETTINGS, trainer=replace(SETTINGS.trainer, iterations=20))
    check_same_run(SAVED, longer, IDENTITY)
    falling = replace(SETTINGS, actor=Actor(path="/models/a", optim=Optim(schedule="linear")))
    saved = Snapshot(SAVED.directory, SAVED.record | {"settings": settings_record(falling)})
    with pytest.raises(ConfigError, match="trainer.iterations: 20, but saved with 10"):
        check_same_run(saved, replace(falling, trainer=longer.trainer), IDENTITY)


def test_bytes_decide_not_names(ranks, tmp_path):
    for name, weights in (("model", "1"), ("copy", "1"), ("other", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_text(weights)
    sources = {name: [str(tmp_path / name)] for name in ("model", "copy", "other")} | {"file": [str(tmp_path / "model/config.json")]}
    first, second = ranks.run("rlhf_mc.checkpoint:identity", Layout(data=2), sources=sources)
    assert first == second and first["model"] == first["copy"] and len(set(first.values())) == 3

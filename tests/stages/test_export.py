"""Exports during a run: in time, whole or not there, and a disk that is full stops all ranks."""

from __future__ import annotations

from ranks import Layout


def test_an_export_is_whole_or_not_there(ranks, language_model, value_model, tmp_path):
    """An earlier attempt left an export of the same iterations, and half of another."""
    root = tmp_path / "exports"
    for earlier in ("000002/actor", "000003.partial/actor"):
        (root / earlier).mkdir(parents=True)
        (root / earlier / "earlier").touch()
    models = dict(language=language_model("llama"), value=value_model("qwen2"))
    first, second = ranks.run("stages.on_ranks:exports", Layout(data=2), output=str(tmp_path), **models)
    assert first == second
    assert first.startswith(f"rank 0: {root}/000004.partial/actor.partial/part-0.safetensors: the model cannot be written: "), first
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*")) == [
        "000002",
        *(f"000002/actor{file}" for file in ("", "/config.json", "/generation_config.json", "/model.safetensors")),
        *(f"000002/critic{file}" for file in ("", "/config.json", "/model.safetensors")),
    ]

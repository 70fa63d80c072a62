"""Whether a run and a checkpoint are of the same run: the bytes of models and data that are not saved, and the settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_mc.checkpoint.disk import record_of
from rlhf_mc.checkpoint.snapshot import Snapshot
from rlhf_mc.config import ConfigError, Settings
from rlhf_mc.parallel.world import World

#: Keys, and sections of keys, that may change on the way: they do not say what is computed, or rounding is all that they change.
_FREE = (
    "trainer.output_dir", "trainer.evaluate_every", "trainer.num_sample_rows", "trainer.trace_iterations", "trainer.trust_remote_code",
    "trainer.save_every", "trainer.keep_last", "trainer.keep_best", "trainer.best_by", "trainer.export_every", "trainer.resume",
    "trainer.device", "trainer.recompute", "trainer.deterministic",
    "data.validation", "supervised", "guard", "watchdog", "wandb", "parallel", "offload", "pipeline", "rollout.placement", "rollout.engine_ranks",
    "rollout.tensor_parallel", "rollout.max_running_sequences", "rollout.kv_cache_gib", "rollout.enforce_eager", "rollout.dump",
    "reward.num_workers", "reward.timeout_seconds", "reward.memory_gib", "reward.network", "reward.max_error_rate",
    "actor.micro_batch", "actor.scoring_micro_batch", "critic.micro_batch", "critic.scoring_micro_batch",
    "reference.scoring_micro_batch", "reward_model.scoring_micro_batch",
)  # fmt: skip
#: Compared by what is there, not by name.
PATHS = ("actor.path", "critic.path", "reference.path", "reward_model.path", "medusa.path", "data.train", "data.ptx")


def identity(world: World, sources: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Collective over all ranks, which share the reading. Key -> a hash of all bytes below the paths that it names.

    sources: files, and directories of models, of which JSON and safetensors count.
    """
    files = {key: [file for path in paths for file in _files_at(Path(path))] for key, paths in sources.items()}
    distinct = sorted({file for named in files.values() for file in named})
    mine = {file: record_of(file, "sha256").digest for file in distinct[world.rank :: world.size]}
    hashes = {file: found for share in world.from_everyone(mine) for file, found in share.items()}
    return {key: hashlib.sha256("".join(hashes[file] for file in named).encode()).hexdigest() for key, named in files.items()}


def _files_at(path: Path) -> list[Path]:
    return sorted((*path.glob("*.json"), *path.glob("*.safetensors"))) if path.is_dir() else [path]


def settings_record(settings: Settings) -> dict[str, Any]:
    """The resolved settings as JSON has them."""
    return json.loads(json.dumps(asdict(settings)))


def check_same_run(snapshot: Snapshot, settings: Settings, found: Mapping[str, str]) -> None:
    """Raises ConfigError with every key and both values where the checkpoint is of another run.

    found: `identity` now. Keys that either side lacks are not compared.
    """
    record = snapshot.record
    saved, now = dict(_flat(record["settings"])), dict(_flat(settings_record(settings)))
    faults = [
        f"{key}: {json.dumps(now[key])}, but saved with {json.dumps(saved[key])}"
        for key in now
        if key in saved and saved[key] != now[key] and not _may_change(key, settings)
    ]
    faults += [
        f"{key}: its files (sha256 {found[key][:12]}...) are not those of the saved run ({then[:12]}...)"
        for key, then in record["identity"].items()
        if key in found and found[key] != then
    ]
    if faults:
        lines = "\n  ".join(faults)
        raise ConfigError(
            f"trainer.resume: auto, but the checkpoint {snapshot.directory} is of another run; set these keys back, "
            f"or name another trainer.output_dir:\n  {lines}"
        )


def _may_change(key: str, settings: Settings) -> bool:
    """A run may be made longer where no learning rate depends on its length."""
    if key == "trainer.iterations":
        return all(section.optim.schedule == "constant" for section in (settings.actor, settings.critic, settings.medusa))
    return key in PATHS or any(key == free or key.startswith(f"{free}.") for free in _FREE)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all leaves; lists are leaves."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

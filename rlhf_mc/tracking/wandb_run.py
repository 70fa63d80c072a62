"""The run in Weights & Biases. The only file that imports wandb, and only where a run is made: the import takes seconds."""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from rlhf_mc.config import ConfigError, Settings
from rlhf_mc.tracking.text import SampleRow, part_names

Mode = Literal["online", "offline", "disabled"]


class WandbRun:
    """One run, resumed under the id kept in `output_dir/wandb_run_id`. wandb reads the API key itself.

    Offline, each lifetime leaves a folder of its own with the same id; `wandb sync --append` joins them. Steps must
    rise: what a resumed run repeats below the last step that an online run has seen is dropped by the server.
    """

    def __init__(self, settings: Settings, mode: Mode, output_dir: Path, run_id: str | None = None) -> None:
        """run_id: of a run that goes on; None: the one kept in `output_dir`."""
        import wandb

        about = settings.wandb
        self.id = kept_run_id(output_dir, run_id)
        self._make_table = wandb.Table
        self._run = wandb.init(
            project=about.project,
            name=about.name,
            group=about.group,
            tags=about.tags,
            id=self.id,
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(output_dir),
            config=asdict(settings),
            settings=wandb.Settings(console="off", silent=True),
        )

    @property
    def place(self) -> str:
        """Where to look: the URL, or the folder to sync."""
        return str(Path(self._run.dir).parent) if self._run.offline else str(self._run.url)

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[SampleRow]) -> None:
        """The one call of this step; the samples go along as a table."""
        values: dict[str, Any] = dict(metrics)
        if samples:
            values["samples"] = self._table(samples)
        self._run.log(values, step=step)

    def summarise(self, values: Mapping[str, float | None]) -> None:
        """Sets numbers of the whole run, shown beside it in the list of runs."""
        self._run.summary.update(dict(values))

    def finish(self, exit_code: int) -> None:
        """Writes what is left and ends wandb's own process; a code other than 0 marks the run as failed."""
        self._run.finish(exit_code=exit_code)

    def _table(self, rows: Sequence[SampleRow]) -> Any:
        parts = part_names(rows)
        table = self._make_table(columns=["prompt", "response", "score", *parts, "finish_reason"])
        for row in rows:
            table.add_data(row.prompt, row.response, row.score, *(row.parts.get(name) for name in parts), row.finish_reason)
        return table


def resolve_mode(mode: Literal["auto", "online", "offline", "disabled"]) -> Mode:
    """`auto` is online where wandb would find an API key, else offline. `online` without one is a ConfigError, because
    wandb would stop to ask for it."""
    if mode == "auto":
        return "online" if has_api_key() else "offline"
    if mode == "online" and not has_api_key():
        raise ConfigError(
            "wandb.mode: online, but no API key was found; set WANDB_API_KEY, run `wandb login` or set wandb.mode=auto"
        )
    return mode


def has_api_key() -> bool:
    """Whether the environment or the netrc file has a key for WANDB_BASE_URL. The key itself is not kept."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def kept_run_id(output_dir: Path, run_id: str | None = None) -> str:
    """The id in `output_dir/wandb_run_id`; where none is there, `run_id`, or a new one, is written there."""
    path = output_dir / "wandb_run_id"
    if path.exists() and (kept := path.read_text().strip()):
        return kept
    made = run_id or secrets.token_hex(8)
    path.write_text(made + "\n")
    return made

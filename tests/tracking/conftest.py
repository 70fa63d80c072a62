"""No test of tracking sees the wandb settings of the person who runs it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_wandb_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key, no mode and no netrc of the person who runs the tests reaches them."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))

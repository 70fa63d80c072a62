"""A directory that is either complete or absent, for the scripts that make models and data.

What it was made with is kept in it as recipe.json, so that a second run knows whether there is anything to do.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RECIPE = "recipe.json"
Recipe = dict[str, Any]


def is_made(target: Path, recipe: Recipe) -> bool:
    """True if `target` was made with `recipe`, False if it is absent; SystemExit if it holds anything else."""
    if not target.exists():
        return False
    file = target / RECIPE
    if not file.is_file():
        raise SystemExit(f"{target} exists, and was not made by this script; remove it, or name another place")
    held = json.loads(file.read_text())
    different = [f"{key}: {held.get(key)}, now {recipe.get(key)}" for key in held | recipe if held.get(key) != recipe.get(key)]
    if different:
        raise SystemExit(f"{target} was made with other arguments ({'; '.join(different)}); remove it, or name another place")
    return True


@contextmanager
def whole_directory(target: Path, recipe: Recipe) -> Iterator[Path]:
    """Give an empty directory beside `target` to write into, and rename it to `target` when the block ends well.

    Where another process has made `target` with the same recipe in the meantime, its work stays and ours is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.parent / f".{target.name}.{os.getpid()}"
    work.mkdir()
    try:
        yield work
        (work / RECIPE).write_text(json.dumps(recipe, indent=2) + "\n")
        try:
            os.rename(work, target)
        except OSError:
            if not is_made(target, recipe):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)

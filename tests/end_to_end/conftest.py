"""What the programs run on here."""

from __future__ import annotations

import pytest
from end_to_end.task import Task, make_task


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Task:
    """A task in a directory of its own for each test file, which may add to it."""
    return make_task(tmp_path_factory.mktemp("task"))

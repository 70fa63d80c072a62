"""What all tests share: the pool of ranks, and one profile for property tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import hypothesis
import pytest
from ranks import RankPool

# The same examples on every run, and no time limit on a busy machine.
hypothesis.settings.register_profile("rlhf_mc", deadline=None, derandomize=True)
hypothesis.settings.load_profile("rlhf_mc")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """See tests/ranks.py."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """family -> the Hugging Face directory of its tiny language model, made once. Treat it as read-only."""
    return _made_once("tiny_language_model", tmp_path_factory)


@pytest.fixture(scope="session")
def value_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """family -> the Hugging Face directory of its tiny model with a score head, made once. Treat it as read-only."""
    return _made_once("tiny_value_model", tmp_path_factory)


def _made_once(maker: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    import tiny_models  # transformers takes seconds to import; most tests do without

    root = tmp_path_factory.mktemp(maker)

    def directory(family: str) -> str:
        path = root / family
        return str(path) if path.exists() else tiny_models.save_model(getattr(tiny_models, maker)(family), path)

    return directory

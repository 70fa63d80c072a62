"""What a reward function receives and returns, and how its name in a recipe becomes a callable.

Imported by every worker process, hence standard library only. Running the functions is in `pool.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

FLOAT32_MAX = 3.4028234663852886e38


class RewardError(RuntimeError):
    """Rewards cannot be had: too many calls failed, or nothing pays for a sample. The message says which and why."""


@dataclass(frozen=True)
class RewardSample:
    """One sampled response, as a reward function sees it.

    prompt, response: text, decoded without special tokens.  prompt_ids, response_ids: the token ids that were used.
    row: the dataset row, as JSON carries it (tuples and arrays are lists, dates are ISO strings, keys are strings).
    truncated: the response hit the token limit and did not finish.
    """

    prompt: str
    response: str
    prompt_ids: list[int]
    response_ids: list[int]
    row: dict[str, Any]
    truncated: bool = False


def load_function(path: str, arguments: dict[str, Any]) -> Callable[[RewardSample], Any]:
    """The function named `package.module:function` or `file.py:function`, with its keyword arguments bound.

    Raises whatever the import raises; AttributeError or TypeError where the name is absent, not callable, or does
    not take (sample, **arguments).
    """
    module_name, _, name = path.rpartition(":")
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    if not hasattr(module, name):
        raise AttributeError(f"{module_name} has no function '{name}'")
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"'{name}' in {module_name} is of type {type(function).__name__}, not a function")
    _check_signature(function, name, arguments)
    return partial(function, **arguments)


def _load_file(file: Path) -> ModuleType:
    """The module in `file`, imported once; its folder becomes importable, as it is for `python file.py`."""
    file = file.resolve()
    name = f"reward_file_{file.stem}_{abs(hash(file)):x}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and postponed annotations look their module up while it is still being executed.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _check_signature(function: Callable[..., Any], name: str, arguments: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C tell nothing about their parameters
        return
    try:
        signature.bind(None, **arguments)
    except TypeError as error:
        given = ", ".join(["sample", *arguments])
        raise TypeError(f"{name}{signature} cannot be called as {name}({given}): {error}") from None


def checked_reward(value: Any, num_response_tokens: int) -> float | list[float]:
    """What a function returned, as one float or one float a response token.

    Numbers, NumPy scalars and arrays and tensors pass. ValueError: not finite in float32, or a list whose length is
    not `num_response_tokens`. TypeError: not numbers.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        if len(value) != num_response_tokens:
            raise ValueError(f"returned {len(value)} rewards for {num_response_tokens} response tokens; one a token is needed")
        return [_finite(x) for x in value]
    return _finite(value)


def _finite(value: Any) -> float:
    if not isinstance(value, (bool, int, float)):
        raise TypeError(f"returned {type(value).__name__}; a reward is a number, or a list with one number a response token")
    if not math.isfinite(value) or abs(value) > FLOAT32_MAX:
        raise ValueError(f"returned {value}, which is not a finite float32 number")
    return float(value)

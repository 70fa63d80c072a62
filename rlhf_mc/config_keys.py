"""Every key of the settings by its dotted name: type, default and meaning, read off the records of config.py.

`python -m rlhf_mc.config_keys > docs/configuration.md` writes the reference page.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rlhf_mc.config import Settings

_INTRODUCTION = """\
# Configuration

Every setting of every program, with its default. Written by `python -m rlhf_mc.config_keys > docs/configuration.md`
from `rlhf_mc/config.py`; edit it there.

A recipe is a YAML file with these sections (examples: `scripts/configs/`); a key that it leaves out keeps its default.
`base: other.yaml` at its top reads that file first, found from the recipe's own folder: sections merge key by key, a list
replaces the list. On the command line, `section.key=value` overrides the recipe, and the last one of a key wins. A value
is read as in the file: `null`, `[a, b]`, `1e-6`. `N` in a key is the place in a list, from 0, as in
`reward.functions.0.weight=0.5`.

`--print-config` prints the settings that result; `--dry-run` checks them and says what would run.
"""


@dataclass(frozen=True)
class Key:
    """One setting: its dotted name, the record and field that declare it, and its default here (MISSING: required)."""

    name: str
    record: type
    field: str
    default: Any

    @property
    def type(self) -> str:
        return type_name(_types(self.record)[self.field])

    @property
    def meaning(self) -> str:
        return _meanings(self.record)[self.field]


@cache
def _types(record: type) -> dict[str, Any]:
    return get_type_hints(record)


@cache
def _meanings(record: type) -> dict[str, str]:
    """The comment behind `#:` of each field, from the source of its record."""
    return dict(re.findall(r"^    (\w+): .*#: (.+)$", inspect.getsource(record), re.MULTILINE))


def all_keys() -> list[Key]:
    """Every key that holds a value, in the order of declaration; keys of list elements have N for their index."""
    return list(_keys(Settings, Settings(), ""))


def _keys(record: type, defaults: Any, prefix: str) -> Iterator[Key]:
    for field in fields(record):
        name, default = prefix + field.name, getattr(defaults, field.name, _own_default(field))
        if is_dataclass(default):
            yield from _keys(type(default), default, f"{name}.")
            continue
        yield Key(name, record, field.name, default)
        for element in get_args(_types(record)[field.name]):
            if is_dataclass(element):
                yield from _keys(element, None, f"{name}.N.")


def _own_default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def all_sections() -> list[str]:
    """Every name that holds keys: `actor`, `actor.optim`, ..."""
    parents = (key.name.rpartition(".")[0] for key in all_keys())
    return sorted({name for parent in parents for name in _with_parents(parent)})


def _with_parents(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def type_at(path: Sequence[str | int]) -> Any:
    """The declared type at a path such as ("reward", "functions", 0, "weight"); KeyError where there is no such key."""
    here: Any = Settings
    for part in path:
        if is_dataclass(here):
            here = _types(here)[part]
        elif get_origin(here) is list and str(part).isdecimal():
            (here,) = get_args(here)
        elif get_origin(here) is dict:
            here = get_args(here)[1]
        elif here is not Any:
            raise KeyError(part)
    return here


def type_name(declared: Any) -> str:
    """A type in a reader's words: `float or null`, `list of str`, `one of auto, cpu, cuda`."""
    arguments = get_args(declared)
    if declared is NoneType:
        return "null"
    if is_dataclass(declared) or get_origin(declared) is dict:
        return "mapping"
    if get_origin(declared) is Literal:
        return "one of " + ", ".join(arguments)
    if get_origin(declared) is list:
        return "list of " + type_name(arguments[0])
    return " or ".join(map(type_name, arguments)) if arguments else declared.__name__


def describe_keys() -> str:
    """The reference page, Markdown: a table of keys for each section, under the section's own words."""
    hints = _types(Settings)
    parts = [_INTRODUCTION]
    for section in fields(Settings):
        rows = [_row(key) for key in all_keys() if key.name.startswith(f"{section.name}.")]
        parts.append(f"## {section.name}\n\n{inspect.getdoc(hints[section.name])}\n")
        parts.append("\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _row(key: Key) -> str:
    default = "required" if key.default is MISSING else f"`{json.dumps(key.default)}`"
    return f"| `{key.name}` | {key.type} | {default} | {key.meaning} |"


if __name__ == "__main__":
    print(describe_keys(), end="")

"""From a recipe file and the command line to Settings, and back to YAML; and whether the files that they name exist.

The records, defaults and checks of the settings are in config.py. Nothing here starts or imports a model.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import TypeAdapter, ValidationError

from rlhf_mc.config import ConfigError, Program, Settings, Trainer, refuse
from rlhf_mc.config_keys import all_keys, all_sections, type_at, type_name

Tree = dict[str, Any]


@dataclass(frozen=True)
class CommandLine:
    """What was asked for beside the settings: the recipe, its overrides as written, and what to do instead of a run."""

    print_config: bool
    dry_run: bool
    config: Path | None
    overrides: tuple[str, ...]


def load_settings(argv: Sequence[str] | None = None, program: Program = "train") -> tuple[Settings, CommandLine]:
    """The settings that `argv` (null: this process's) asks for: defaults, then the recipe and its bases, then overrides.

    Raises one ConfigError that lists every unknown key and wrong type. Contradictions are for `Settings.check`.
    """
    command = _parse_command_line(argv, program)
    # A default belongs to its place (critic.optim.lr is not actor.optim.lr), so what is given is laid on all defaults.
    tree = asdict(_defaults(program))
    if command.config is not None:
        tree = _merged(tree, _read_recipe(command.config, followed=()))
    errors = []
    for override in command.overrides:
        try:
            _apply_override(tree, override)
        except ConfigError as error:
            errors.append(str(error))
    try:
        # JSON, because pydantic's strict mode takes nested records from JSON only, and only it refuses "1" for 1.
        settings = TypeAdapter(Settings).validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        errors += [_sentence(fault) for fault in error.errors()]
    refuse(errors)
    return settings, command


def _defaults(program: Program) -> Settings:
    return Settings(trainer=Trainer(mode="heads")) if program == "heads" else Settings()


def to_yaml(settings: Settings) -> str:
    """All settings, in the order of declaration; a recipe that loads as equal settings."""
    return yaml.dump(asdict(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def check_files(settings: Settings, program: Program) -> None:
    """Refuse, in one ConfigError, every model directory, data file and rollout file of `program` that is not there."""
    data = settings.data
    replays = program == "train" and not settings.trainer.generates
    if replays:
        models = {"actor.path": settings.actor.path} | _critic_source(settings)
        files = {"data.ptx": data.ptx}
    elif program == "heads":
        models = {"actor.path": settings.actor.path}
        files = {"data.train": data.train}
    elif program == "train":
        models = {f"{role}.path": getattr(settings, role).path for role in ("actor", "critic", "reference", "reward_model")}
        files = {"data.train": data.train, "data.validation": data.validation, "data.ptx": data.ptx}
    else:
        models = {"supervised.path": settings.supervised.path}
        files = {"data.train": data.train, "data.validation": data.validation}
    model_errors = [_model_error(key, Path(path)) for key, path in models.items() if path]
    file_errors = [_file_error(f"{key}.{n}", Path(path)) for key, paths in files.items() for n, path in enumerate(paths)]
    refuse([error for error in (*model_errors, *file_errors, _replay_error(settings) if replays else None) if error])


def _critic_source(settings: Settings) -> dict[str, str | None]:
    """The key and path that the critic starts from."""
    if not settings.has_critic:
        return {}
    if settings.critic.path:
        return {"critic.path": settings.critic.path}
    return {"reward_model.path": settings.reward_model.path}


def _model_error(key: str, path: Path) -> str | None:
    if not path.is_dir():
        return f"{key}: {path} is not a directory (from {Path.cwd()}); name a local Hugging Face directory"
    if not (path / "config.json").is_file():
        return f"{key}: {path} holds no config.json; name a local Hugging Face directory"
    return None


def _file_error(key: str, path: Path) -> str | None:
    return None if path.is_file() else f"{key}: {path} is not a file (from {Path.cwd()}); name a JSONL or parquet file"


def _replay_error(settings: Settings) -> str | None:
    """What is wrong where trainer.mode=update misses the rollouts of an iteration."""
    iterations = settings.trainer.iterations
    missing = next((i for i in range(iterations) if not settings.replay_file(i).is_file()), None)
    if missing is None:
        return None
    fix = f"set trainer.iterations={missing}, or make" if missing else "make"
    return (
        f"rollout.replay_dir: {settings.rollout.replay_dir} (from {Path.cwd()}) has no {settings.replay_file(missing).name}, the rollouts "
        f"of iteration {missing} of trainer.iterations {iterations}; {fix} them by a run with rollout.dump=true"
    )


# ---- the command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        usage = self.format_usage().rstrip()
        raise ConfigError(f"command line: {message}; overrides are written section.key=value, without dashes\n{usage}")


def _parse_command_line(argv: Sequence[str] | None, program: Program) -> CommandLine:
    parser = _Parser(prog=program, allow_abbrev=False, epilog="Every key: docs/configuration.md")
    parser.add_argument("--config", type=Path, metavar="FILE", help="recipe, YAML; without one, defaults")
    parser.add_argument("--print-config", action="store_true", help="print the resulting settings and end")
    parser.add_argument("--dry-run", action="store_true", help="check all that needs no device, say what would run, and end")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of the recipe, values in YAML")
    arguments = vars(parser.parse_intermixed_args(argv))
    return CommandLine(**arguments | {"overrides": tuple(arguments["overrides"])})


def _apply_override(tree: Tree, override: str) -> None:
    """Set the key of `key=value` in `tree`; a mapping is merged into the section of that name."""
    key, equals, text = override.partition("=")
    path = key.split(".")
    try:
        type_at(path)
    except KeyError:
        raise ConfigError(_unknown(key)) from None
    if not equals:
        raise ConfigError(f"{key}: an override needs a value; write {key}=VALUE")
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        reason = getattr(error, "problem", error)
        raise ConfigError(f"{key}: {text!r} is not YAML ({reason}); quote it, and once more for the shell") from None
    *parents, last = path
    here: Any = tree
    for depth, name in enumerate(parents):
        here = _child(here, name, path[:depth], {})
    present = _child(here, last, parents, None)
    here[_place(here, last)] = _merged(present, value) if isinstance(present, dict) and isinstance(value, dict) else value


def _child(node: Any, name: str, parents: Sequence[str], missing: Any) -> Any:
    """What `node` holds at `name`, where `missing` is put first if nothing is there."""
    if isinstance(node, dict):
        return node.setdefault(name, missing)
    if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
        return node[int(name)]
    parent, held = ".".join(parents), f"a list of {len(node)}" if isinstance(node, list) else json.dumps(node)
    raise ConfigError(f"{parent}.{name}: {parent} is {held} and has no {name}; override {parent} as a whole")


def _place(node: Any, name: str) -> str | int:
    return int(name) if isinstance(node, list) else name


# ---- recipe files


def _read_recipe(path: Path, followed: tuple[Path, ...]) -> Tree:
    """The file at `path` merged over the `base` that it names, if any; `followed` are the files that led here."""
    path = path.resolve()
    if path in followed:
        raise ConfigError(f"base: {' -> '.join(map(str, [*followed, path]))} is a circle; remove one of these `base` lines")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader) or {}
    except OSError as error:
        key = f"base of {followed[-1]}" if followed else "--config"
        raise ConfigError(f"{key}: cannot read {path} ({error.strerror}); name a YAML file") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {_kind(tree)}; a recipe holds sections of keys, as in `actor: {{path: DIRECTORY}}`")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base: {json.dumps(base)} is not the name of one YAML file")
    return _merged(_read_recipe(path.parent / base, (*followed, path)), tree)


def _merged(under: Tree, over: Tree) -> Tree:
    """`over` laid on `under`: mappings merge key by key, anything else replaces."""
    both = {key for key in under.keys() & over.keys() if isinstance(under[key], dict) and isinstance(over[key], dict)}
    return under | over | {key: _merged(under[key], over[key]) for key in both}


_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """YAML that holds what JSON can hold, with the scalars of version 1.2, and no key twice.

    So 1e-6 is a number, and on, 12:30 and 2026-01-01 are strings; PyYAML's own rules say the opposite.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}
    yaml_constructors = {
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (None, *(f"{_TAG}{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")))
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} comes twice", key.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that `_Loader` would take for something else, and no others."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
):
    for _yaml in (_Loader, _Dumper):
        _yaml.add_implicit_resolver(f"{_TAG}{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


# ---- error messages


def _sentence(fault: Any) -> str:
    """One of pydantic's faults as `key: what is wrong; what to do`."""
    path = fault["loc"]
    key = ".".join(map(str, path))
    if fault["type"] == "unexpected_keyword_argument":
        return _unknown(key)
    expected = type_name(type_at(path))
    if fault["type"] == "missing":
        return f"{key}: missing; expected {expected}"
    if fault["type"] == "finite_number":
        return f"{key}: {fault['input']} is not a finite number; expected {expected}"
    hint = f' (quote it: "{fault["input"]}")' if expected.startswith("str") and isinstance(fault["input"], int | float) else ""
    return f"{key}: {_kind(fault['input'])}; expected {expected}{hint}"


def _unknown(key: str) -> str:
    names = [*all_sections(), *(known.name for known in all_keys())]
    written = re.sub(r"\.\d+(?=\.|$)", ".N", key)
    longer = sorted((name for name in names if _leaves_out(written, name)), key=len)
    nearest = longer or difflib.get_close_matches(written, names, n=1)
    fix = f"did you mean {nearest[0]}?" if nearest else "docs/configuration.md lists all keys"
    return f"{key or repr(key)}: no such key; {fix}"


def _leaves_out(written: str, name: str) -> bool:
    """Whether `written` is `name` without some of its parts, as actor.lr is actor.optim.lr without optim."""
    parts = iter(name.split("."))
    return all(part in parts for part in written.split("."))


def _kind(value: Any) -> str:
    """The value as YAML writes it, cut where it is long, and its type."""
    text = json.dumps(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return text if value is None else f"{text} is {type(value).__name__}"

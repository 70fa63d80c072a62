"""Who imports whom: the direction between the rooms of the package, and the libraries that stay in theirs."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rlhf_mc"
FILES = sorted(PACKAGE.rglob("*.py"))

# Each row may import from itself and from the rows above it.
ROWS = [
    {"config", "contradictions", "config_keys", "recipe", "batch", "algorithms"},
    {"parallel"},
    {"models", "offload", "medusa"},
    {"pipeline"},
    {"launch", "plan", "checkpoint", "pictures"},
    {"stages"},
    {"train", "main", "export_checkpoint", "rehearsal"},
]
SETTINGS_AND_RECORDS = {"config", "contradictions", "config_keys", "recipe", "batch"}
SIDE_ROOMS = {"data", "rewards", "rollout_files", "tracking", "reliability"}  # import settings and records only; the last three rows may import them

WITHOUT_MEGATRON = [
    "config contradictions config_keys recipe batch algorithms data rewards rollout_files tracking reliability plan main launch pictures",
    "parallel/grids parallel/context parallel/reshard parallel/balance parallel/microbatches parallel/logprobs",
    "parallel/wire parallel/exchange parallel/job",
    "models/hf_config models/weight_layout models/loss models/precision medusa/shape medusa/steps",
    "pipeline/dispatch pipeline/schedule pipeline/control pipeline/generation pipeline/server pipeline/weight_sync",
    "pipeline/engine pipeline/engine_limits pipeline/engine_process",
    "medusa/shape medusa/files medusa/draft_length models/activations parallel/logits_chunk",
    "stages/serve",
]
WITHOUT_TORCH = [
    "config contradictions config_keys recipe reliability launch",
    "models/activations models/roles parallel/logits_chunk pipeline/kv_cache",
    "offload/layout offload/minimum offload/parts offload/planned offload/sizes offload/text plan main",
    "models/hf_config models/weight_layout parallel/grids parallel/reshard parallel/balance parallel/microbatches",
    "medusa/shape medusa/steps medusa/draft_length medusa/drafting",
]


def module_name(file: Path) -> str:
    """rlhf_mc.parallel.world for its file, rlhf_mc.parallel for the folder's __init__."""
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in FILES}


def room_of(module: str) -> str:
    """parallel for rlhf_mc.parallel.world."""
    return (module.split(".") + [""])[1]


def _is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _nodes_that_run(tree: ast.AST, also_in_functions: bool) -> list[ast.AST]:
    """Every node that import runs, and those that a call runs where asked; never those for type checkers."""
    nodes: list[ast.AST] = []
    for child in ast.iter_child_nodes(tree):
        if _is_for_types_only(child):
            continue
        nodes.append(child)
        if also_in_functions or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes += _nodes_that_run(child, also_in_functions)
    return nodes


@cache
def imports_of(file: Path, also_in_functions: bool = True) -> frozenset[str]:
    """Names of the modules that a file imports: of rlhf_mc by module, of others as written."""
    names: set[str] = set()
    for node in _nodes_that_run(ast.parse(file.read_text()), also_in_functions):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in inner}
    return frozenset(names)


@cache
def loaded_with(module: str) -> frozenset[str]:
    """Every module, ours or not, that importing `module` loads by our files' own import statements."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        parent = name.rpartition(".")[0]
        if parent in MODULES:
            waiting.append(parent)
        if name in MODULES:
            waiting += imports_of(MODULES[name], also_in_functions=False)
    return frozenset(found)


def uses(names: frozenset[str], library: str) -> bool:
    return any(name == library or name.startswith(f"{library}.") for name in names)


def modules_named(lines: list[str]) -> list[str]:
    """Of lines such as "config parallel/grids", the modules that exist; a folder stands for all its files."""
    prefixes = [f"rlhf_mc.{name.replace('/', '.')}" for line in lines for name in line.split()]
    return [name for name in MODULES if any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)]


def test_the_checks_see_the_package() -> None:
    assert "rlhf_mc.pipeline.engine" in MODULES
    assert uses(imports_of(MODULES["rlhf_mc.pipeline.engine"]), "vllm"), "also an import inside a function counts"
    assert uses(imports_of(MODULES["rlhf_mc.parallel.world"]), "megatron")
    assert uses(loaded_with("rlhf_mc.models.passes"), "megatron") and "rlhf_mc.config" in loaded_with("rlhf_mc.models.passes")
    assert room_of("rlhf_mc.parallel.world") == "parallel" and room_of("rlhf_mc.config") == "config"


def test_vllm_is_imported_by_the_engine_its_parts_and_its_wire_only() -> None:
    expected = ["engine", "nccl_wire", "vllm_parts", "vllm_sampling"]
    assert [name for name, file in MODULES.items() if uses(imports_of(file), "vllm")] == [f"rlhf_mc.pipeline.{name}" for name in expected]
    for part, user in (("vllm_parts", "engine"), ("vllm_sampling", "vllm_parts")):
        users = [name for name, file in MODULES.items() if f"rlhf_mc.pipeline.{part}" in imports_of(file)]
        assert users == [f"rlhf_mc.pipeline.{user}"]


def test_matplotlib_is_imported_by_pictures_only() -> None:
    users = {room_of(name) for name, file in MODULES.items() if uses(imports_of(file), "matplotlib")}
    assert users == {"pictures"}


@pytest.mark.parametrize("module", modules_named(WITHOUT_MEGATRON))
def test_loads_no_megatron(module: str) -> None:
    """Nor through what it imports."""
    assert not uses(loaded_with(module), "megatron")


@pytest.mark.parametrize("module", modules_named(WITHOUT_TORCH))
def test_loads_no_torch(module: str) -> None:
    """So that settings and plans are checked before anything heavy is loaded."""
    assert not any(uses(loaded_with(module), library) for library in ("torch", "transformers", "vllm", "megatron"))


def _allowed(room: str) -> set[str]:
    """Rooms that `room` may import, besides itself."""
    if room in SIDE_ROOMS:
        return SETTINGS_AND_RECORDS
    row = next(i for i, rooms in enumerate(ROWS) if room in rooms)
    below = set().union(*ROWS[: row + 1])
    return below | SIDE_ROOMS if row >= len(ROWS) - 3 else below


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    room = room_of(module)
    ours = {name for name in imports_of(MODULES[module]) if name.split(".")[0] == "rlhf_mc"} - {"rlhf_mc"}
    if not room:
        assert not ours, "the package's __init__ imports nothing"
        return
    wrong = [name for name in ours if room_of(name) not in {room, *_allowed(room)}]
    assert not wrong, f"{room} may import {sorted(_allowed(room))}"


def test_every_room_has_its_place() -> None:
    """A new file or folder must be put into ROWS or SIDE_ROOMS, and so be thought about."""
    assert {room_of(name) for name in MODULES} - {""} <= set().union(*ROWS, SIDE_ROOMS)


def test_rooms_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for name, file in MODULES.items():
        others = {room_of(other) for other in imports_of(file) if other.split(".")[0] == "rlhf_mc"}
        graph.setdefault(room_of(name), set()).update(others - {room_of(name), ""})
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_no_file_without_a_noun() -> None:
    names = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}
    places = [PACKAGE, ROOT / "scripts", ROOT / "tests"]
    assert not [file for place in places for file in place.rglob("*.py") if file.name in names]


@pytest.mark.parametrize("module", MODULES)
def test_every_file_says_what_lives_there(module: str) -> None:
    assert ast.get_docstring(ast.parse(MODULES[module].read_text()))


def test_every_folder_says_what_it_may_import() -> None:
    silent = []
    for folder in (path for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))):
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        if "import" not in text.lower():
            silent.append(folder.name)
    assert not silent

"""Imports go downwards only, and parts do not know each other."""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "rollfeed"
LAYERS = [
    "errors",
    "faults",
    "logs",
    "base",
    "types",
    "answers",
    "seeds",
    "model_files",
    "protocols",
    "completions",
    "sample_builder",
    "conversations",
    "chat_apis",
    "routing",
    "config",
    "<part>",
    "router",
    "compat",
    "app",
    "viewer",
    "benchmarks",
    "cli",
    "__init__",
    "__main__",
]
NOT_PARTS = {*LAYERS, "testing"} - {"<part>"}
CIRCLES = {
    frozenset(
        {
            "rollfeed.benchmarks.client_pipeline",
            "rollfeed.benchmarks.client_process",
            "rollfeed.benchmarks.client_slime",
        }
    ),
}
"""Modules and sub-packages that import each other still; nothing may be added."""


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in PACKAGE.rglob("*.py")}


@cache
def imported_modules(path: Path) -> set[str]:
    """Return the modules of the package that one imports anywhere in it, for types too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else node.module or "" for name in names}
    return {name for name in found if name.startswith("rollfeed.")} - {module_of(path)}


def imported_by(path: Path) -> set[str]:
    return {module.split(".")[1] for module in imported_modules(path)}


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Return the sets of nodes that can all be reached from each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            new = graph.get(ahead.pop(), set()) - seen
            seen |= new
            ahead.extend(new)
        reached[start] = seen
    rings = {frozenset(other for other in seen if start in reached.get(other, ())) for start, seen in reached.items()}
    return {ring for ring in rings if len(ring) > 1}


def imports_between_siblings() -> dict[str, dict[str, set[str]]]:
    """Return, for every package, which of its modules and sub-packages imports which other one."""
    graphs: dict[str, dict[str, set[str]]] = {}
    for module, path in MODULES.items():
        for imported in imported_modules(path):
            ours, theirs = module.split("."), imported.split(".")
            differing = (at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
            at = next(differing, None)
            if at is not None:
                graph = graphs.setdefault(".".join(ours[:at]), {})
                graph.setdefault(".".join(ours[: at + 1]), set()).add(".".join(theirs[: at + 1]))
    return graphs


def layer_of(name: str) -> int:
    return LAYERS.index(name if name in NOT_PARTS else "<part>")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_lower_layers_only(path: Path) -> None:
    importer = name_of(path)
    for imported in imported_by(path) - {importer}:
        if importer == "testing":
            assert layer_of(imported) <= layer_of("protocols"), f"testing imports {imported}"
            continue
        if imported == "testing" and importer in {"benchmarks", "cli"}:  # they start fake servers
            continue
        assert imported not in {"testing", "__init__", "__main__"}, f"{importer} imports {imported}"
        assert layer_of(imported) < layer_of(importer), f"{importer} imports {imported}"


def test_no_modules_and_no_packages_import_each_other() -> None:
    found = circles({module: imported_modules(path) for module, path in MODULES.items()})
    for graph in imports_between_siblings().values():
        found |= circles(graph)
    assert found - CIRCLES == set()
    assert CIRCLES - found == set(), "these are gone by now: take them off the list"


def test_parts_do_not_import_each_other_is_what_the_layers_say() -> None:
    assert layer_of("pipeline") == layer_of("engine") == layer_of("plugins")


def test_packages_are_small() -> None:
    registries = {PACKAGE / "environments" / "builtin", PACKAGE / "config", PACKAGE / "cli"}
    for folder in {path.parent for path in PACKAGE.rglob("*.py")} - registries - {PACKAGE}:
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= 12, f"{folder} has {len(modules)} modules"


def test_modules_and_functions_are_short() -> None:
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 400, f"{path} has {text.count(chr(10))} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 60, f"{path}: {node.name} has {length} lines"

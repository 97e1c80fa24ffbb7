"""Imports go downwards only, and parts do not know each other."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "rollfeed"
LAYERS = [
    "errors",
    "faults",
    "types",
    "answers",
    "seeds",
    "cores",
    "model_files",
    "protocols",
    "config",
    "<part>",
    "app",
    "benchmarks",
    "cli",
    "__init__",
    "__main__",
]
NOT_PARTS = {
    "errors",
    "faults",
    "types",
    "answers",
    "seeds",
    "cores",
    "model_files",
    "protocols",
    "config",
    "app",
    "benchmarks",
    "cli",
    "testing",
    "__init__",
    "__main__",
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_by(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules = [node.module or ""]
            if node.module == "rollfeed":
                modules = [f"rollfeed.{alias.name}" for alias in node.names]
        found |= {module.split(".")[1] for module in modules if module.startswith("rollfeed.")}
    return found


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

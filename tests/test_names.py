"""A name means one thing, and a docstring's first sentence says what the thing does."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "rollfeed"

ANYWHERE = {"__init__.py"}
"""File names that every package may have."""
SECTIONS = ("config", "protocols", "cli")
"""Folders of a file a section, a seam or a command, named after what it is about."""
FILES_TWICE = {
    "calibration.py",
    "checkpoint.py",
    "checks.py",
    "client.py",
    "control.py",
    "directory.py",
    "engine.py",
    "files.py",
    "loop.py",
    "model.py",
    "probe.py",
    "registry.py",
    "replies.py",
    "requests.py",
    "results.py",
    "rewards.py",
    "rows.py",
    "runner.py",
    "running.py",
    "scoring.py",
    "server.py",
    "turns.py",
}
"""File names that repeat still, the sections aside; nothing may be added."""

OPENINGS = ("What", "Of", "Which", "How", "Where", "Who", "When")


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE), ast.parse(path.read_text(encoding="utf-8"))


def test_no_class_name_is_defined_twice() -> None:
    places = defaultdict(list)
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice == {}


def test_file_names_do_not_repeat() -> None:
    places = defaultdict(list)
    for path, _ in modules():
        if path.name not in ANYWHERE and path.parts[0] not in SECTIONS:
            places[path.name].append(str(path))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in FILES_TWICE} == {}
    assert FILES_TWICE - twice.keys() == set(), "these are named once by now: take them off the list"


def test_docstrings_begin_with_what_the_thing_is_or_does() -> None:
    found = []
    for path, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            name = getattr(node, "name", "the module")
            if not name.startswith("_") and (ast.get_docstring(node) or "").split(" ")[0] in OPENINGS:
                found.append(f"{path}: {name}")
    assert found == []

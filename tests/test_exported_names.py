"""What `rollfeed` offers to Python programs: every name there is, told once, and told to type checkers too."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

import rollfeed


@pytest.mark.parametrize("name", rollfeed.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(rollfeed, name) is not None


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(rollfeed.__file__).read_text())
    imported = {
        (node.module, alias.name)
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in ast.walk(branch)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert rollfeed.__all__ == sorted(name for _, name in imported)
    for home, name in imported:
        assert getattr(rollfeed, name) is getattr(import_module(str(home)), name)


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rollfeed.nothing  # noqa: B018

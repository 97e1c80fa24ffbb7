"""What `rollfeed` offers to Python programs: every name there is, told once, and told to type checkers too."""

import ast
from pathlib import Path

import pytest

import rollfeed


def test_names_are_sorted_and_each_has_one_home() -> None:
    homes = [name for names in rollfeed._HOMES.values() for name in names]
    assert rollfeed.__all__ == sorted(homes)
    assert len(set(homes)) == len(homes)


@pytest.mark.parametrize("name", rollfeed.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(rollfeed, name) is not None


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(rollfeed.__file__).read_text())
    imported = {
        (str(node.module).removeprefix("rollfeed."), alias.name)
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in ast.walk(branch)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == {(home, name) for home, names in rollfeed._HOMES.items() for name in names}


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rollfeed.nothing  # noqa: B018

"""Settings as they are in the end, as a settings file, with a comment on each value that says where it was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollfeed.compat.convert.toml_text import value_text
from rollfeed.config.load import is_named
from rollfeed.config.run_spec import read_settings
from rollfeed.config.section import Section
from rollfeed.config.settings import Settings


def resolved_text(settings: Settings, *, files: Sequence[Path], overrides: Sequence[str]) -> str:
    """Return all settings as the text of a settings file, which makes the same ones; what is unset is left out.

    A table ``[train]`` is there only where the settings train: without one they are those of a run.

    Raises:
        ConfigError: If one of ``files`` can no longer be read.
    """
    origins = [(file.name, read_settings(file)) for file in files]

    def origin(key: str) -> str:
        if is_named(key, overrides):
            return "  # --set"
        names = [name for name, tree in origins if _has(tree, key)]
        return f"  # {names[-1]}" if names else ""

    texts = []
    for table, values in _tables(settings, settings.resolved()):
        lines = [
            f"{name} = {value_text(value)}{origin(f'{table}.{name}'.strip('.'))}" for name, value in values.items()
        ]
        texts.append("\n".join([*([f"[{table}]"] if table else []), *lines]))
    return "\n\n".join(texts) + "\n"


def _tables(section: Section, tree: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tables of a section and those in it, with the values that are set; tables of users stay in one line."""
    inner = {name: each for name in tree if isinstance(each := getattr(section, name, None), Section)}
    values = {name: value for name, value in tree.items() if name not in inner and value is not None}
    if values or not inner:
        yield at, values
    for name, each in inner.items():
        yield from _tables(each, tree[name], f"{at}.{name}" if at else name)


def _has(tree: Any, key: str) -> bool:
    for name in key.split("."):
        if not isinstance(tree, Mapping) or name not in tree:
            return False
        tree = tree[name]
    return True

"""``slime:`` and ``slime_drop:``: import paths of functions that are written for slime."""

from __future__ import annotations

from typing import Any

SLIME = "slime:"
SLIME_DROP = "slime_drop:"
"""Of a filter whose True means drop, as in plug-ins of before ``DynamicFilterOutput``."""
PREFIXES = (SLIME, SLIME_DROP)


def is_slime_path(given: Any) -> bool:
    """Whether a setting names a function that is written for slime."""
    return isinstance(given, str) and given.startswith(PREFIXES)


def import_path(given: str) -> str:
    """Return ``module:name`` of a path with a prefix; slime writes ``module.name``."""
    path = given.partition(":")[2]
    if ":" in path:
        return path
    module, dot, name = path.rpartition(".")
    return f"{module}:{name}" if dot else path

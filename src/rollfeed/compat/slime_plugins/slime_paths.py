"""``slime:`` and ``slime_drop:``: import paths of functions that are written for slime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SLIME = "slime:"
SLIME_DROP = "slime_drop:"
"""Of a filter whose True means drop, as in plug-ins of before ``DynamicFilterOutput``."""
PREFIXES = (SLIME, SLIME_DROP)


GENERATE_PATH = "generate_function_path"
"""Key of a prompt's metadata, and field of slime's samples: what answers it, in the place of the run's function."""
REWARD_FN = "reward_fn"
"""Key of metadata: what scores the sample, as ``slime:`` path where slime's has a ``custom_rm_path``."""


def paths_of(metadata: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the fields of slime's samples that name functions for one sample."""
    scored_by = metadata.get(REWARD_FN)
    rm_path = str(scored_by).removeprefix(SLIME) if is_slime_path(scored_by) else None
    return {GENERATE_PATH: metadata.get(GENERATE_PATH), "custom_rm_path": rm_path}


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

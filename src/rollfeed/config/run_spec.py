"""A run's settings and functions, all that it is built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from rollfeed.config.load import chosen_keys, merged, read_json, read_toml, validate_settings
from rollfeed.config.paths import as_paths, expand_path
from rollfeed.config.resuming import as_of_now
from rollfeed.config.settings import Settings


@dataclass(frozen=True, slots=True)
class RunSpec:
    """All that a run is built from, in this process or another.

    It can be pickled: functions are import paths, or objects that can be pickled themselves.
    """

    settings: Settings
    folders: tuple[Path, ...] = ()
    """Where data files and plug-in modules are looked for, in this order."""
    chosen: frozenset[str] = frozenset()
    """Keys of settings that are as they are on purpose: a run that is resumed may have others than before."""

    @classmethod
    def load(cls, file: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> RunSpec:
        """Read a settings file, or several of which later ones win, and apply ``key=value`` overrides.

        Files that settings name are looked for beside the later ones first, then in this folder.

        Raises:
            ConfigError: If a file cannot be read, is not TOML, or has a setting that is wrong.
        """
        files = as_paths([file] if isinstance(file, str | Path) else file)
        tree = reduce(merged, map(read_settings, files))
        settings = validate_settings(tree, where=", ".join(map(str, files)), overrides=overrides)
        folders = dict.fromkeys([*(file.resolve().parent for file in reversed(files)), Path.cwd()])
        if (template := settings.model.chat_template) is not None:
            path = next((each for folder in folders if (each := folder / expand_path(template)).exists()), template)
            model = settings.model.model_copy(update={"chat_template": str(path)})
            settings = settings.model_copy(update={"model": model})
        return cls(settings, tuple(folders), chosen_keys(tree, overrides, settings))


def read_settings(file: Path) -> dict[str, Any]:
    """Return the tables of a settings file: TOML, or the ``settings.json`` that a run left.

    Raises:
        ConfigError: If it cannot be read.
    """
    return as_of_now(read_json(file)) if file.suffix == ".json" else read_toml(file)

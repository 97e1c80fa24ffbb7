"""A run's settings and functions, all that it is built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollfeed.config.load import chosen_keys, read_toml, validate_settings
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
    def load(cls, file: Path, overrides: Sequence[str] = ()) -> RunSpec:
        """Read a settings file and apply ``key=value`` overrides; it looks for files beside that, and in this folder.

        Raises:
            ConfigError: If the file cannot be read, is not TOML, or has a setting that is wrong.
        """
        tree = read_toml(file)
        settings = validate_settings(tree, where=str(file), overrides=overrides)
        folders = tuple(dict.fromkeys([file.resolve().parent, Path.cwd()]))
        return cls(settings, folders, chosen_keys(tree, overrides, settings))

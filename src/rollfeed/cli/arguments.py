"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollfeed.config import Settings, chosen_keys, load_settings
from rollfeed.config.paths import expand_path


def path_argument(text: str) -> Path:
    """Return the path that an argument names; a shell leaves ``~`` in ``--out=~/runs`` to us."""
    return Path(expand_path(text))


def add_settings_arguments(parser: argparse.ArgumentParser, *, needs_file: bool = True) -> None:
    """Add the settings file and its overrides."""
    nargs = None if needs_file else "?"
    parser.add_argument("file", metavar="FILE", type=path_argument, nargs=nargs, help="settings file (TOML)")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override a setting, for example rollout.num_rollout=3; may be given several times",
    )


def settings_of(arguments: argparse.Namespace) -> tuple[Settings, list[Path]]:
    """Return the settings, and the folders in which data files and plug-ins are looked for.

    Raises:
        ConfigError: If the file or an override is wrong.
    """
    settings = load_settings(arguments.file, arguments.overrides)
    folders = [arguments.file.resolve().parent, Path.cwd()]
    return settings, list(dict.fromkeys(folders))


def chosen_of(arguments: argparse.Namespace, settings: Settings) -> frozenset[str]:
    """Return the keys of settings that ``--set`` decides; :func:`settings_of` has returned ``settings``."""
    return chosen_keys(arguments.file, arguments.overrides, settings)

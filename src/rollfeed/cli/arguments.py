"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollfeed.config import RunSpec
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


def spec_of(arguments: argparse.Namespace) -> RunSpec:
    """Return the run that the settings file and its overrides describe.

    Raises:
        ConfigError: If the file or an override is wrong.
    """
    return RunSpec.load(arguments.file, arguments.overrides)

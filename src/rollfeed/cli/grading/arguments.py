"""Arguments of the commands that grade without a run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from rollfeed.cli.arguments import path_argument
from rollfeed.config import PluginSettings, RewardSettings, ScoringSettings, load_scoring_settings
from rollfeed.errors import ConfigError


def add_reward_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what graders need to know."""
    parser.add_argument(
        "--rm-type", metavar="NAME", help="grader of responses that name none, or a function of yours as module:name"
    )
    parser.add_argument("--remote-url", metavar="URL", help="reward server of rm_type remote_rm")
    parser.add_argument("--workers", metavar="N", type=int, help="processes for grading (default: the cores)")
    parser.add_argument("--timeout", metavar="S", type=float, help="seconds for comparing formulas (default 5)")
    parser.add_argument(
        "--isolation",
        metavar="LEVEL",
        help="run programs at this level or not at all: bubblewrap, namespaces or limits (default: the best there is)",
    )
    parser.add_argument(
        "--settings",
        metavar="FILE",
        type=path_argument,
        help="take the tables [reward] and [plugins] of a settings file (TOML)",
    )


@dataclass(frozen=True, slots=True)
class Scoring:
    """How responses are scored."""

    settings: RewardSettings
    functions: PluginSettings
    folders: tuple[Path, ...]
    """Where modules of functions are looked for."""


def scoring_of(arguments: argparse.Namespace) -> Scoring:
    """Return what the arguments make.

    Raises:
        ConfigError: If one is out of its bounds.
    """
    file: Path | None = arguments.settings
    base = ScoringSettings() if file is None else load_scoring_settings(file)
    folders = [Path.cwd()] if file is None else [file.resolve().parent, Path.cwd()]
    tree = base.reward.model_dump()
    given = [
        (("rm_type",), "--rm-type", arguments.rm_type),
        (("remote", "url"), "--remote-url", arguments.remote_url),
        (("workers", "num_workers"), "--workers", arguments.workers),
        (("workers", "timeout_seconds"), "--timeout", arguments.timeout),
        (("code", "isolation"), "--isolation", arguments.isolation),
    ]
    for path, option, value in given:
        if value is None:
            continue
        section = tree if len(path) == 1 else tree[path[0]]
        section[path[-1]] = value
        try:
            RewardSettings.model_validate(tree)
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ConfigError(f"{option} {value}: {message}") from None
    return Scoring(RewardSettings.model_validate(tree), base.plugins, tuple(dict.fromkeys(folders)))

"""Commands and arguments as several of them have them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from rollfeed.config import PluginSettings, RewardSettings, RunSpec, ScoringSettings, load_scoring_settings
from rollfeed.config.api_key import ApiKey
from rollfeed.config.load import read_label_names
from rollfeed.config.paths import expand_path
from rollfeed.errors import ConfigError

Parsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    commands: Parsers,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    epilog: str,
    help: str | None = None,
    description: str | None = None,
) -> argparse.ArgumentParser:
    """Return the parser of a command or an action, which runs ``run``; an epilog of several lines stays as it is.

    ``help`` is what the list of a command's actions says; that of the commands is in ``main.py``.
    """
    form = argparse.RawDescriptionHelpFormatter if "\n" in epilog else argparse.HelpFormatter
    parser = commands.add_parser(name, help=help, description=description, epilog=epilog, formatter_class=form)
    parser.set_defaults(run=run)
    return parser


def add_actions(commands: Parsers, name: str) -> Parsers:
    """Return what the actions of a command are added to."""
    return commands.add_parser(name).add_subparsers(title="actions", required=True, metavar="ACTION")


def add_numbers(parser: Any, options: Mapping[str, tuple[int | float, str]]) -> None:
    """Add options that take a number of their default's type; each has its default and its help."""
    for name, (default, told) in options.items():
        kind = type(default)
        shown = f"{told} (default {default:g})" if "(default" not in told else told
        parser.add_argument(name, type=kind, default=default, metavar="N" if kind is int else "X", help=shown)


def add_flags(parser: argparse.ArgumentParser, *, json: str | None = None, quiet: bool = False, **flags: str) -> None:
    """Add options that are there or not, by name with their help: ``--quiet``, ``--json`` and others."""
    if quiet:
        flags["quiet"] = "no progress, only errors and the result"
    if json is not None:
        flags["json"] = f"print {json}"
    for name, told in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=told)


def add_address(parser: argparse.ArgumentParser, port: int, told: str) -> None:
    """Add where a server listens, with the default port and what its help says of ports."""
    parser.add_argument("--host", metavar="H", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", metavar="P", type=int, default=port, help=f"{told} (default {port})")


def add_server_key(
    parser: argparse.ArgumentParser,
    option: str = "--key-env",
    *,
    of: str = "clients",
    may_do_without: bool = True,
) -> None:
    """Add what clients of a server have to bear; with ``may_do_without``, also that they need bear nothing."""
    parser.add_argument(option, metavar="VAR", help=f"variable with the key of {of}; needed off this machine")
    if may_do_without:
        told = "whoever reaches --host may ask, without a key, for clients that send none"
        parser.add_argument("--no-key", action="store_true", help=told)


def server_key(arguments: argparse.Namespace, option: str = "--key-env") -> ApiKey:
    """Return the key that clients of a server have to bear, without a value where they need none.

    Raises:
        ConfigError: If the variable has none, or others can reach a server that has none.
    """
    from rollfeed.base.serving import is_loopback  # which takes a while that other commands need not wait

    key = ApiKey.read(getattr(arguments, option[2:].replace("-", "_")), setting=option)
    may_do_without = hasattr(arguments, "no_key")
    if key.value is None and not is_loopback(arguments.host) and not getattr(arguments, "no_key", False):
        remedy = ", or say --no-key where nobody else is in that network" if may_do_without else ""
        told = f"others can reach it: put a key into a variable, and name that as {option}{remedy}"
        raise ConfigError(f"--host {arguments.host}: {told}")
    return key


def path_argument(text: str) -> Path:
    """Return the path that an argument names; a shell leaves ``~`` in ``--out=~/runs`` to us."""
    return Path(expand_path(text))


def add_path(parser: argparse.ArgumentParser, name: str, metavar: str, told: str, *, required: bool = False) -> None:
    """Add an option that takes a path."""
    parser.add_argument(name, metavar=metavar, type=path_argument, help=told, required=required)


def add_settings_arguments(parser: argparse.ArgumentParser, *, needs_file: bool = True) -> None:
    """Add the settings file and its overrides."""
    told = "settings file: TOML, or the settings.json of a run; of several files, later ones win"
    nargs = "+" if needs_file else "*"
    parser.add_argument("files", metavar="FILE", type=path_argument, nargs=nargs, default=[], help=told)
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add what overrides settings."""
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override a setting, for example rollout.num_rollout=3, or unset it with KEY=; may be given several times",
    )


def load_spec(files: Sequence[Path], overrides: Sequence[str]) -> RunSpec:
    """Return what settings files say, with overrides; what a ``settings.json`` names is where its run found it.

    Raises:
        ConfigError: If a file or a setting is wrong.
    """
    spec = RunSpec.load(files, overrides)
    runs = [file.parent for file in files if file.suffix == ".json" and (file.parent / "journal.sqlite").exists()]
    if not runs:
        return spec
    from rollfeed.app import stored_folders  # which takes a while, that others need not wait

    folders = [folder for run in runs for folder in stored_folders(run)]
    return replace(spec, folders=tuple(dict.fromkeys([*spec.folders, *folders])))


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
        help="run programs at this level or not at all: container, bubblewrap, namespaces or limits (default: the best "
        "of this machine's own)",
    )
    add_path(parser, "--settings", "FILE", "take the tables [reward] and [plugins] of a settings file (TOML)")


@dataclass(frozen=True, slots=True)
class Scoring:
    """Settings and functions by which responses are scored."""

    settings: RewardSettings
    functions: PluginSettings
    folders: tuple[Path, ...]
    """Where modules of functions are looked for."""
    label_names: frozenset[str] = frozenset()
    """Columns of labels, by which functions may ask for them."""


def scoring_of(arguments: argparse.Namespace, stored: Scoring | None = None) -> Scoring:
    """Return what the arguments of :func:`add_reward_arguments` make, of ``stored`` in place of ``--settings``.

    Raises:
        ConfigError: If one is out of its bounds.
    """
    file: Path | None = arguments.settings
    if stored is None:
        read = ScoringSettings() if file is None else load_scoring_settings(file)
        names = frozenset() if file is None else read_label_names(file)
        stored = Scoring(read.reward, read.plugins, tuple(_folders(file)), names)
    tree = stored.settings.model_dump()
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
            raise ConfigError(f"{option} {value}: {first_problem(error)}") from None
    return replace(stored, settings=RewardSettings.model_validate(tree))


def first_problem(error: ValidationError) -> str:
    """Return what is wrong with the first value of a section that is."""
    return error.errors()[0]["msg"].removeprefix("Value error, ")


def _folders(file: Path | None) -> list[Path]:
    return list(dict.fromkeys([*([] if file is None else [file.resolve().parent]), Path.cwd()]))

"""``rollfeed init``: settings, a reward and data to start from."""

from __future__ import annotations

import argparse
import os
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

from rollfeed.cli.arguments import Parsers, add_command, add_flags, path_argument
from rollfeed.errors import ConfigError

_TEMPLATES = Path(__file__).parent / "templates"
_SETTINGS = "run.toml"
_WITHOUT_TORCH = "servers"
_EPILOG = """\
examples:
  rollfeed init --list                  the templates
  rollfeed init dataset my-sums         a csv and a reward, in the folder my-sums
  cd my-sums && rollfeed run run.toml --out runs/first
"""


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "init",
        run,
        description="Write a settings file and what it needs into a folder: it runs as it is, and comments say what to "
        "change next. No file is overwritten.",
        epilog=_EPILOG,
    )
    parser.add_argument("template", metavar="TEMPLATE", nargs="?", default="dataset", help="default: dataset")
    parser.add_argument("folder", metavar="DIR", nargs="?", type=path_argument, help="default: named as the template")
    add_flags(parser, list="list the templates")


def run(arguments: argparse.Namespace) -> int:
    """Write a template's files and say what comes next. Raises ConfigError if it cannot; nothing is written then."""
    names = sorted(path.name for path in _TEMPLATES.iterdir() if (path / _SETTINGS).exists())
    if arguments.list:
        for name in names:
            print(f"{name:<16}  {_head(name)[0]}")
        return 0
    name = arguments.template
    if name not in names:
        meant = "".join(f": did you mean {near}?" for near in get_close_matches(name, names, n=1))
        raise ConfigError(
            f"there is no template {name!r}{meant}; there are {', '.join(names)}, and a folder comes behind it"
        )
    folder = arguments.folder or Path(name)
    written = _write(_TEMPLATES / name, folder)
    print(f"{folder}: {', '.join(written)}; comments say what to change")
    if name != _WITHOUT_TORCH and find_spec("torch") is None:
        print("the embedded engine needs PyTorch: pip install 'rollfeed[local]'")
    print("\n".join(["next:", *([] if folder.samefile(Path()) else [f"  cd {quote(str(folder))}"]), *_head(name)[1:]]))
    return 0


def _head(name: str) -> list[str]:
    """Return what the comment at the top of a template says: one line about it, then its commands."""
    lines = (_TEMPLATES / name / _SETTINGS).read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    return [lines[0].removeprefix("# "), *(line.removeprefix("# ") for line in lines if line.startswith("#   "))]


def _write(template: Path, folder: Path) -> list[str]:
    """Copy a template's files into a folder, and return their names."""
    names = sorted((path.name for path in template.iterdir() if path.is_file()), key=lambda name: name != _SETTINGS)
    if there := [name for name in names if os.path.lexists(folder / name)]:
        raise ConfigError(f"{folder}: has {', '.join(there)} already, which is not replaced; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            with (folder / name).open("xb") as file:
                file.write((template / name).read_bytes())
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error
    return names

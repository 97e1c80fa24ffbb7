"""``rollfeed convert-slime``: a settings file made of slime's or miles's flags."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollfeed.cli import checking, exit_codes
from rollfeed.cli.arguments import Parsers, add_command, add_flags, add_path
from rollfeed.config import RunSpec
from rollfeed.config.load import validate_settings
from rollfeed.errors import ConfigError
from rollfeed.types.text import counted

if TYPE_CHECKING:
    from rollfeed.compat.convert.conversion import Converted

_EPILOG = """SOURCE is a shell script that runs slime's train.py (variables, arrays, source and if are followed, nothing
is run), "-" for one from standard input, or flags. What is not carried over stands at the end of the file,
with the reason. docs/from-slime.md says of each flag what becomes of it.
The exit code is 0 when a file was made, 1 when --check finds it wrong, 2 when flags are wrong or contradict each other.

examples:
  rollfeed convert-slime scripts/run-qwen3-4B.sh --out run.toml --check
  rollfeed convert-slime "--hf-checkpoint Qwen/Qwen3-4B --prompt-data dapo.jsonl --input-key prompt --rm-type deepscaler
    --rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 100 --rollout-max-response-len 8192"
"""


_OWN = ("--out", "--check", "--overwrite", "--json", "-h", "--help")


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "convert-slime",
        run,
        description="Write the settings that a script for slime or miles means, and list what they cannot say.",
        epilog=_EPILOG,
    )
    parser.add_argument("source", metavar="SOURCE", nargs="+", help="a shell script, or flags")
    add_path(parser, "--out", "FILE", "for the settings (default: standard output)")
    add_flags(
        parser,
        check="run `rollfeed check` on the settings",
        overwrite="replace --out where it is there",
        json="settings, what each flag became and what is left as one JSON object",
    )


def with_flags_as_source(words: Sequence[str]) -> list[str]:
    """Return a command line on which flags of slime's are one argument, as flags in quotes are."""
    if words[:1] != ["convert-slime"]:
        return list(words)
    own, flags, rest = ["convert-slime"], list[str](), iter(words[1:])
    for word in rest:
        if word in _OWN or word.startswith("--out="):
            own += [word, *([next(rest, "")] if word == "--out" else [])]
        elif word != "--":
            flags.append(word if word.startswith("--") or "--" in word else shlex.quote(word))
    line = " ".join(flags)
    return [*own, *(["--", line] if any("--" in word for word in flags) else shlex.split(line))]


def run(arguments: argparse.Namespace) -> int:
    """Convert, and say what was not carried over.

    Raises:
        ConfigError: If a flag is wrong, or flags contradict each other.
    """
    converted = _converted(arguments.source)
    if arguments.out is not None:
        _write(converted, arguments.out, overwrite=arguments.overwrite)
    elif not arguments.json:
        print(converted.text(), end="")
    found = _check(converted, arguments) if arguments.check else None
    if arguments.json:
        print(json.dumps(_summary(converted) | ({} if found is None else {"check": found}), ensure_ascii=False))
    else:
        _tell(converted, arguments.out)
    return exit_codes.DONE if found is None or found["ok"] else exit_codes.FAILED


def _converted(given: list[str]) -> Converted:
    from rollfeed.compat.convert.conversion import convert_script

    text = " ".join(given)
    if text == "-":
        return convert_script(sys.stdin.read(), source="standard input", folder=Path())
    path = Path(os.path.expanduser(text))
    if os.path.isfile(path):  # a path may be too long for Path.is_file()
        if path.suffix == ".py":
            raise ConfigError(
                f"{path}: is a Python program, which is not run; give the flags that it passes, in quotes"
            )
        try:
            return convert_script(path.read_text(encoding="utf-8-sig"), source=str(path), folder=path.parent)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8 text'})"
            ) from None
    if "--" not in text:
        raise ConfigError(f"{text}: no such script, and no flags; give a shell script, or flags in quotes")
    return convert_script(text, source="flags")


def _write(converted: Converted, out: Path, *, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise ConfigError(f"--out {out}: is there already; give another, or --overwrite")
    try:
        out.write_text(converted.text(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror})") from None


def _check(converted: Converted, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what `rollfeed check` finds; its lines for people go where the settings do not."""
    name = str(arguments.out or converted.source)
    folders = tuple(dict.fromkeys([*([arguments.out.resolve().parent] if arguments.out else []), Path.cwd()]))
    try:
        spec = RunSpec(validate_settings(converted.tree, where=name), folders)
        with contextlib.redirect_stdout(sys.stderr if arguments.out is None else sys.stdout):
            return checking.check(spec, name=name, tells=not arguments.json)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"rollfeed: {line}", file=sys.stderr)
        return {"ok": False, "problems": str(error).splitlines()}


def _summary(converted: Converted) -> dict[str, Any]:
    return {
        "settings": converted.tree,
        "carried": {f"--{name}": list(keys) for name, keys in converted.carried.items()},
        "not_carried": [{"flag": each.what, "where": each.where, "reason": each.reason} for each in converted.left],
        "notes": list(converted.notes),
    }


def _tell(converted: Converted, out: Path | None) -> None:
    if out is not None:
        print(f"{out}: settings of {converted.source}")
        print("\n".join([*(f"not carried over: {each}" for each in converted.left), *converted.notes]))
    counts = f"{counted(len(converted.carried), 'flag')} carried over, {len(converted.left)} not"
    print(f"{counts}: see the end of the file for the reasons", file=sys.stderr if out is None else sys.stdout)

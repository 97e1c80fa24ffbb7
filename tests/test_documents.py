"""What README and docs/ show exists: commands with their flags, settings, files, and places that links lead to."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.compat.setting_keys import is_setting

from rollfeed.cli.main import build_parser
from rollfeed.config import RunSpec
from rollfeed.config.load import validate_settings
from rollfeed.config.settings import Settings

ROOT = Path(__file__).parents[1]
PAGES = [path.relative_to(ROOT) for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(?:\$ |.*[ /(])?rollfeed ([a-z].*)$")
INLINE = re.compile(r"`(?:\.venv/bin/)?rollfeed ([a-z][^`]*)`")
SETTING = re.compile(rf"`({'|'.join(Settings.model_fields)})((?:\.[a-z_0-9]+)+)`")
FILES = (".py", ".json", ".jsonl", ".toml", ".md", ".safetensors")
OTHERS_NAMES = {
    "docs/from-verl.md": "its first column has verl's; tests/compat/test_settings_side_by_side.py has the second",
    "docs/from-prime-rl.md": "as docs/from-verl.md",
    "docs/from-slime.md": "it is generated, and its settings with it",
    "docs/slime-plugins.md": "it names modules of slime",
}
"""Pages in whose sentences other programs' names look like settings, and why."""
NO_NAMES_OF_SETTINGS = {"eval.final.change"}
"""What else looks like a setting: a key of `rollfeed train --json`."""
BASE = {"prompts": {"environments": [{"id": "core/copy_text"}]}}
"""What fragments of settings need besides, unless they bring prompts."""
NO_SETTINGS = {"docs/extending.md": ("[project.entry-points",)}
"""Beginnings of TOML blocks that are of other programs: here of a package's pyproject.toml."""


class Shown(NamedTuple):
    """A command as a page shows it."""

    page: Path
    words: list[str]


def blocks(page: Path, *kinds: str) -> Iterator[str]:
    for kind, text in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        if kind in kinds:
            yield text


def shown_commands() -> Iterator[Shown]:
    for page in PAGES:
        for block in blocks(page, "", "bash", "sh", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                if found := COMMAND.match(line):
                    # Behind the command: a comment, what it does in a column of its own, or what takes its output.
                    text = re.split(r"\s#|\s{3,}|\s[|>&]\s?", found[1])[0]
                    text = re.sub(r"\bN\b", "1", re.sub(r"\[(--[^\]]*)\]", r"\1", text))  # of a usage line
                    yield Shown(page, shlex.split(text))


def parsed(words: list[str]) -> argparse.Namespace | str:
    """Return what the command line makes of a command, or the line with which it refuses it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            return build_parser(words[0]).parse_args(words)
    except SystemExit as end:
        return said.getvalue().strip().splitlines()[-1] if end.code else argparse.Namespace()


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    grid = [each.partition(",")[0] for each in getattr(arguments, "grid", None) or ()]
    return [*(getattr(arguments, "overrides", None) or ()), *grid]


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options of a parser and of its commands."""
    found: set[str] = set()
    for action in parser._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            found.update(*(options_of(each) for each in action.choices.values()), action.choices)
    return found


def problem_of(command: Shown) -> str | None:
    arguments = parsed(command.words)
    if isinstance(arguments, str):
        return arguments
    files = [ROOT / each for each in getattr(arguments, "files", ())]
    try:
        if files and all(each.exists() for each in files):
            RunSpec.load(files, overrides_of(arguments))
        elif overrides := overrides_of(arguments):
            validate_settings(BASE, where=str(command.page), overrides=overrides)
    except ValueError as error:
        return str(error)
    missing = [word for word in command.words if word.startswith("examples/") and not (ROOT / word).exists()]
    return f"no such file: {missing[0]}" if missing else None


def test_each_command_in_a_block_is_one_with_its_flags_settings_and_files() -> None:
    commands = list(shown_commands())
    assert len(commands) > 40
    problems = [(str(each.page), shlex.join(each.words), told) for each in commands if (told := problem_of(each))]
    assert problems == []


def test_each_command_in_a_sentence_is_there_with_its_flags() -> None:
    known: dict[str, set[str]] = {}
    problems, number = [], 0
    for page in PAGES:
        for text in INLINE.findall(BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))):
            number += 1
            command, *words = text.split()
            if command not in known:
                known[command] = options_of(build_parser(command))
            action = [words[0]] if command in ("env", "serve", "atif") and words and words[0].islower() else []
            used = {word.partition("=")[0] for word in words if word.startswith("--")}
            if missing := sorted({command, *action, *used} - known[command]):
                problems.append((str(page), text, missing))
    assert number > 100
    assert problems == []


def test_settings_in_toml_blocks_are_settings() -> None:
    number = 0
    for page in PAGES:
        for block in blocks(page, "toml"):
            if block.startswith(NO_SETTINGS.get(str(page), ())):
                continue
            number += 1
            tree: dict[str, Any] = tomllib.loads(block)
            validate_settings(tree if "prompts" in tree else {**BASE, **tree}, where=str(page))
    assert number > 20


def test_settings_in_sentences_are_settings() -> None:
    problems, number = [], 0
    for page in PAGES:
        text = "" if str(page) in OTHERS_NAMES else BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))
        for section, rest in SETTING.findall(text):
            name = re.sub(r"\.\d+", "", section + rest)  # entries of lists
            if not name.endswith(FILES) and name not in NO_NAMES_OF_SETTINGS:
                number += 1
                problems += [] if is_setting(name) else [(str(page), name)]
    assert problems == []
    assert number > 300


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    here = ROOT / page
    text = BLOCK.sub("", here.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = here if not path else (here.parent / path)
        assert there.exists(), target
        assert not anchor or there.suffix != ".md" or anchor in anchors(there), target

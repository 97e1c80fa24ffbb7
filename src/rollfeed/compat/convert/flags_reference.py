"""The tables of docs/from-slime.md, made of the flags: ``python -m rollfeed.compat.convert.flags_reference FILE``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from rollfeed.compat.convert.eval_config import KEYS, LEFT
from rollfeed.compat.convert.table import FLAGS, Flag

_START = "## Flag by flag\n"
_OF = {"s": "slime", "m": "miles", "g": "Megatron", "e": "earlier slime"}


def with_tables(page: str) -> str:
    """Return the page with the tables at its end as the flags are now."""
    head, start, _ = page.partition(_START)
    return head + start + "\n" + "\n".join(_tables())


def _tables() -> Iterator[str]:
    yield "The letters: " + ", ".join(f"{letter} is {name}" for letter, name in _OF.items()) + ".\n"
    for section, flags in groupby(FLAGS.values(), key=lambda flag: flag.section):
        yield f"### {section}\n\n| flag | of | default | becomes | what differs, or why not |\n|---|---|---|---|---|"
        yield "\n".join(map(_row, flags)) + "\n"
    yield "## Keys of `--eval-config`\n\n| key | becomes | why not |\n|---|---|---|"
    yield "\n".join([*(f"| `{key}` | `eval.datasets.{ours}` | |" for key, ours in KEYS.items()), *_left()]) + "\n"


def _row(flag: Flag) -> str:
    default = f"`{flag.default}`" if flag.default else ""
    cells = [f"`--{flag.name}`", " ".join(flag.of.replace(",", "")), default, _settings(flag.becomes), _cell(flag.text)]
    return f"| {' | '.join(cells)} |"


def _settings(keys: Iterable[str]) -> str:
    return ", ".join(key if key.startswith("(") else f"`{key}`" for key in keys) or "not carried over"


def _left() -> Iterator[str]:
    return (f"| `{key}` | not carried over | {_cell(reason)} |" for key, reason in LEFT.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")

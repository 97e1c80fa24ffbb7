"""Lines and tables of `rollfeed show`, which fit the terminal, or 80 columns in a file or pipe."""

from __future__ import annotations

import json
import math
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

_GAP = 2


def console() -> Console:
    """Return where lines go."""
    return Console(highlight=False, markup=False, emoji=False)


def print_line(to: Console, text: str, *, style: str = "", is_whole: bool = False) -> None:
    """Print a text, wrapped; one that ``is_whole`` keeps its own lines, however long they are."""
    shown = Text(visible(text), style=style)
    for line in [shown] if is_whole else shown.wrap(to, to.width):
        line.rstrip()
        to.print(line, soft_wrap=True)


def print_section(to: Console, title: str, text: str) -> None:
    """Print a text of the run under a title, whole."""
    to.print()
    print_line(to, f"-- {title}", style="bold")
    print_line(to, text, is_whole=True)


def print_table(to: Console, names: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str] = ()) -> None:
    """Print rows under the names of their columns, those at the right end left out where there is no room.

    Numbers stand to the right; of columns named in ``left``, which are texts, the last one is cut to what is left.
    """
    cells = [list(names), *(list(map(one_line, row)) for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    room = [sum(widths[: number + 1]) + _GAP * number for number in range(len(widths))]
    shown = [number for number, needed in enumerate(room) if needed <= to.width]
    if len(shown) < len(widths) and names[-1] in left:
        others = sum(widths[:-1]) + _GAP * (len(widths) - 1)
        widths[-1] = max(min(widths[-1], to.width - others), 1)
        shown = list(range(len(widths)))
    for line in cells:
        parts = [fitted(line[at], widths[at], is_left=names[at] in left) for at in shown]
        to.print(Text((" " * _GAP).join(parts).rstrip(), style="bold" if line is cells[0] else ""), soft_wrap=True)


def fitted(text: str, width: int, *, is_left: bool = True) -> str:
    """Return a text in so many columns of a terminal, cut with an ellipsis or filled; wide characters count two."""
    if cell_len(text) > width:
        return set_cell_size(text, width - 1) + "…" if width > 1 else set_cell_size(text, width)
    space = " " * (width - cell_len(text))
    return text + space if is_left else space + text


def cut_start(text: str, width: int) -> str:
    """Return the end of a text that takes more columns than there are: what tells paths apart, or an answer has."""
    if cell_len(text) <= width:
        return text
    end = text[-width + 1 :]
    while cell_len(end) >= width:
        end = end[1:]
    return "…" + end


def duration_text(seconds: float) -> str:
    """Return a duration as people say it."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def visible(text: str) -> str:
    """Return text whose control characters, which could command a terminal, are spelled out."""
    return "".join(
        character if character in "\n\t" or unicodedata.category(character) != "Cc" else f"\\x{ord(character):02x}"
        for character in text
    )


def one_line(text: str) -> str:
    """Return a text without line breaks, as it can be shown."""
    return " ".join(visible(text).split())


def number_text(value: float | None, form: str) -> str:
    """Return a number as people read it, and a dash where there is none."""
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def counts_text(counts: Mapping[str, int]) -> str:
    """Return what is there of what: ``aborted 2, dropped 1``."""
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()) if count)


def json_text(value: Any) -> str:
    """Return a value in one line."""
    return json.dumps(value, ensure_ascii=False)


def print_json(value: Any) -> None:
    """Print one JSON value; numbers that JSON has not are null."""
    json.dump(_finite(value), sys.stdout, indent=2)
    sys.stdout.write("\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""The page as one HTML file that holds what it shows, and asks nobody."""

from __future__ import annotations

import random
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollfeed.store import RunReader
from rollfeed.viewer.found_runs import is_evaluation, list_line, problem_of
from rollfeed.viewer.overviews import overview
from rollfeed.viewer.sample_rows import sample_rows
from rollfeed.viewer.token_texts import RunTokenizers
from rollfeed.viewer.whole_sample import whole_samples

ASSETS = ("view.css", "view.js")
MOST_BYTES = 10_000_000
_MOST_STEPS = 150  # whose samples are looked at; others would have none in the file
_EACH = 2  # samples of a step: so many of the worst, of the best, and of the others; then what there is room for
_MOST_SAMPLES, _MOST_ROWS = 1_000, 100_000  # of a run, and of a step that is looked at
_READ_AT_ONCE = 8  # samples of a step, with their groups: long ones take much memory
_SEED = 0


@cache
def read_asset(name: str) -> str:
    """Return a file of the page."""
    return files("rollfeed.viewer").joinpath("page", name).read_text(encoding="utf-8")


def html(content: bytes | None = None) -> str:
    """Return the page; with ``content``, JSON of what it shows, it is one file."""
    if content is None:
        inside, script = '<link rel="stylesheet" href="view.css">', '<script src="view.js"></script>'
    else:
        style, code = (read_asset(name) for name in ASSETS)
        policy = f"default-src 'none'; script-src '{_hash(code)}'; style-src '{_hash(style)}'"
        policy += "; img-src data:; base-uri 'none'"
        inside = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
        # A text of a run may end the element, or open a comment in it, so no "<" stands there.
        held = content.decode().replace("<", "\\u003c")
        script = f'<script type="application/json" id="content">{held}</script>\n<script>{code}</script>'
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>rollfeed</title>\n'
        f'{inside}\n</head>\n<body>\n<div id="page"></div>\n{script}\n</body>\n</html>\n'
    )


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


@dataclass(slots=True)
class _Content:
    room: int
    """Bytes that are left for samples."""
    answers: dict[str, Any] = field(default_factory=dict)
    """By run: ``rows`` and ``samples``."""
    chosen: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By run: rows of samples, in the order in which there should be room for them."""
    num_shown: int = 0
    num_all: int = 0


def write_report(runs: Mapping[str, Path], path: Path, *, most_bytes: int = MOST_BYTES) -> tuple[int, int]:
    """Write the page on some runs as one file; return how many of their samples it has, and how many there are.

    Of each step it has some of the worst, of the best and of the others, of as many steps as there is room for. Of
    several runs, one that cannot be read is there with what is wrong.

    Raises:
        RollfeedError: If the only run cannot be read.
        OSError: If the file cannot be written.
    """
    overviews: dict[str, Any] = {}
    lines = {name: list_line(name, folder) for name, folder in runs.items()}
    content, tokenizers = _Content(room=most_bytes), RunTokenizers()

    @contextmanager
    def told(name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever is wrong with one, the others are shown
            if len(runs) == 1:
                raise
            lines[name] |= {"status": "unreadable", "problem": problem_of(error)}

    for name, folder in runs.items():
        with told(name):
            overviews[name] = overview(name, folder)
            content.chosen[name] = _chosen(folder, content)
    fixed = {"runs": list(lines.values()), "overviews": overviews}
    content.room -= len(html(msgspec.json.encode(fixed)).encode()) + 1_000
    share = content.room // len(runs)
    for name, rows in content.chosen.items():
        with told(name):
            _add(content, name, rows, runs[name], tokenizers, until=content.room - share)
    shown = {"num_shown": content.num_shown, "num_all": content.num_all}
    stored = {"runs": list(lines.values()), "overviews": overviews, "stored": content.answers, **shown}
    path.write_text(html(msgspec.json.encode(stored)), encoding="utf-8")
    return content.num_shown, content.num_all


def _add(
    content: _Content, name: str, rows: list[dict[str, Any]], folder: Path, tokenizers: RunTokenizers, *, until: int
) -> None:
    """Add samples of a run while more than ``until`` bytes are left."""
    kept = content.answers[name] = {"rows": [], "samples": {}}
    for row, sample in _encoded(rows, folder, tokenizers):
        # Each "<" takes five more bytes in the file.
        size = sum(len(text) + 5 * text.count(b"<") for text in (msgspec.json.encode(row), sample)) + 20
        if content.room - size < until:
            break
        content.room -= size
        content.num_shown += 1
        kept["rows"].append(row)
        kept["samples"][row["id"]] = msgspec.Raw(sample)


def _encoded(
    rows: Sequence[dict[str, Any]], folder: Path, tokenizers: RunTokenizers
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield rows with their samples as JSON; with one of a step those are read that come next of it."""
    read: dict[str, bytes] = {}
    for place, row in enumerate(rows):
        if row["id"] not in read:
            beside = [each["id"] for each in rows[place:] if each["step"] == row["step"]][:_READ_AT_ONCE]
            found = whole_samples(folder, beside, tokenizers)
            read |= {sample["id"]: msgspec.json.encode(sample) for sample in found}
        yield row, read.pop(row["id"])


def _chosen(folder: Path, content: _Content) -> list[dict[str, Any]]:
    """Return rows of samples, those first that should be there: a few of each step, the last step's first."""
    if is_evaluation(folder):
        first, later, num_all = _few(folder, each=100)
        content.num_all += num_all
        return [*first, *later]
    with RunReader(folder) as reader:
        records = reader.steps()
    places = np.linspace(len(records) - 1, 0, min(_MOST_STEPS, len(records))).round().astype(int)
    looked = [records[place] for place in places]
    content.num_all += sum(each.num_samples for each in records) - sum(each.num_samples for each in looked)
    chosen: list[list[dict[str, Any]]] = []
    others: list[dict[str, Any]] = []
    for record in looked:
        first, later, num_all = _few(folder, f"step={record.step}", each=_EACH)
        content.num_all += num_all
        chosen.append(first)
        others += later[: _MOST_SAMPLES - len(others)]
    in_turns = [row for row in chain.from_iterable(zip_longest(*chosen)) if row is not None]
    return [*in_turns, *others][:_MOST_SAMPLES]


def _few(folder: Path, *filters: str, each: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    """Return so many of the worst, the best and the other rows, those that are left, by chance, and how many match."""
    rows = sample_rows(folder, *filters, num=_MOST_ROWS)["rows"]
    scored = sorted((row for row in rows if row["reward"] is not None), key=lambda row: row["reward"])
    ends = zip(scored[:each], scored[::-1], strict=False)
    chosen = {row["id"]: row for row in chain.from_iterable(ends)}
    others = [row for row in rows if row["id"] not in chosen]
    random.Random(f"{_SEED} {filters}").shuffle(others)
    return [*chosen.values(), *others[:each]], others[each:], len(rows)

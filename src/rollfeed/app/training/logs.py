"""What training writes line by line, and the curves that are read from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollfeed.report import Curves, read_curves
from rollfeed.store.atomic import replace_file
from rollfeed.store.layout import EVAL_LOG, METRICS, TRAIN_LOG


def run_curves(out: Path) -> Curves:
    """Return the curves of a run directory as its logs have them now; empty ones where nothing was trained."""
    return read_curves(train_log=out / TRAIN_LOG, eval_log=out / EVAL_LOG, metrics=out / METRICS)


class RecordLog:
    """One line of JSON a record; those that a process which goes on will make again are taken out."""

    def __init__(self, path: Path, *, keep: Callable[[dict[str, Any]], bool]) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if (record := _whole(line)) is not None and keep(record)]
        replace_file(path, lambda file: file.write("".join(f"{line}\n" for line in kept).encode()))
        self.has_records = bool(kept)

    def add(self, record: Mapping[str, Any]) -> None:
        self.has_records = True
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _whole(line: str) -> dict[str, Any] | None:
    """Return a record, or None for a line that a kill has cut short."""
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return record

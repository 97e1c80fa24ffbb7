"""What training writes line by line, and the curves that are read from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollfeed.report import Curves, curves_of
from rollfeed.store.atomic import replace_file
from rollfeed.store.json_text import read_records
from rollfeed.store.layout import EVAL_LOG, METRICS, TRAIN_LOG


def run_curves(out: Path) -> Curves:
    """Return the curves of a run directory as its logs have them now; empty ones where nothing was trained."""
    return curves_of(
        evaluations=read_records(out / EVAL_LOG),
        trained=read_records(out / TRAIN_LOG),
        metrics=read_records(out / METRICS),
    )


class RecordLog:
    """One line of JSON a record; those that a process which goes on will make again are taken out."""

    def __init__(self, path: Path, *, keep: Callable[[dict[str, Any]], bool]) -> None:
        self._path = path
        kept = [record for record in read_records(path) if keep(record)]
        replace_file(path, lambda file: file.write("".join(map(_line, kept)).encode()))
        self.records: list[Mapping[str, Any]] = list(kept)
        """Those of earlier processes included."""

    def add(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(record))


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"

"""Reads answers as rows that are graded one by one: of a run, an evaluation or a file of any form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollfeed.errors import DataError
from rollfeed.prompts.files import COMPRESSIONS, KINDS, missing_column, open_prompt_file
from rollfeed.rewards.scoring import read_rows
from rollfeed.store import RunReader
from rollfeed.store.layout import ANSWERS_FILE, JOURNAL

ReadRows = Callable[[Path], Iterator[Mapping[str, Any]]]
_FORMS = frozenset({*KINDS, *COMPRESSIONS} - {".jsonl"})


def answer_reader(path: Path, columns: Mapping[str, str]) -> ReadRows:
    """Return what reads the answers at a path; what it reads is a :class:`DataError` where it cannot be read.

    Args:
        path: A run directory, the folder of an evaluation, or a file; one of JSON lines unless its name says otherwise.
        columns: Names in the file of what is called otherwise in rows: ``{"response": "completion"}``.
    """
    if (path / JOURNAL).is_file():
        read: ReadRows = _rows_of_run
    elif (path / ANSWERS_FILE).is_file():
        read = _rows_of_evaluation
    else:
        read = _rows_of_file if path.suffix.lower() in _FORMS else read_rows
    return partial(_renamed, read, columns) if columns else read


def _rows_of_run(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the finished answers of all committed steps, kept or dropped; an episode's by its last sample."""
    with RunReader(path) as reader:
        for record in reader.steps():
            groups = [*reader.batch(record.step).groups, *(each.group for each in reader.dropped(record.step))]
            for group in sorted(groups, key=lambda group: group.group_index):
                for place, rollout in enumerate(group.rollouts):
                    if rollout.has_finished:
                        prompt, sample = group.prompt, rollout.samples[-1]
                        yield {
                            "id": f"{record.step}/{group.group_index}/{place}",
                            "response": sample.response,
                            "label": prompt.label,
                            "metadata": dict(prompt.metadata),
                            "prompt": prompt.text,
                        }


def _rows_of_evaluation(path: Path) -> Iterator[dict[str, Any]]:
    try:
        file = pq.ParquetFile(path / ANSWERS_FILE)
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                name = f"{row['set']}/{row['index']}/{row['answer']}"
                label = None if row["label"] is None else json.loads(row["label"])
                yield {"id": name, "response": row["response"], "label": label, "prompt": row["prompt"]}
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{path}: its answers cannot be read ({error}); make the evaluation again") from None


def _rows_of_file(path: Path) -> Iterator[dict[str, Any]]:
    for row in open_prompt_file(str(path), columns=None).rows:
        try:
            yield row.read()
        except ValueError as error:
            raise DataError(f"{row.where}: {error}") from None


def _renamed(read: ReadRows, columns: Mapping[str, str], path: Path) -> Iterator[dict[str, Any]]:
    for row in read(path):
        if missing := next((name for name in columns if columns[name] not in row), None):
            raise missing_column(path, f"--column {missing}", columns[missing], list(row))
        rest = {name: value for name, value in row.items() if name not in columns.values()}
        yield {**rest, **{name: row[column] for name, column in columns.items()}}

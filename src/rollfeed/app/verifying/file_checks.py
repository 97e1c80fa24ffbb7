"""Compares every file of a run with what the journal, or the file itself, says of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rollfeed.app.training.directory import checkpoint_folders
from rollfeed.base.atomic import Digest, digest_of, file_problem, read_regular, sealed_problems
from rollfeed.base.sealed import size_unsealed
from rollfeed.errors import RunDirectoryError
from rollfeed.store import RunReader, RunStatus
from rollfeed.store.layout import (
    GROWING_FILES,
    ISOLATION,
    JOURNAL,
    METRICS,
    PICTURES,
    SETTINGS,
    STEP_FOLDERS,
    STEPS,
    TURNS,
    export_folders,
    step_file,
)
from rollfeed.store.step_log import metrics_problem
from rollfeed.store.vouching import OF_RUN, Vouched, num_whole, settings_problem

_PICTURE = re.compile(r"([0-9a-f]{64})\.\w+")


class FileCheck(NamedTuple):
    """A file, and how it is compared."""

    name: str
    """Below the directory."""
    problem: Callable[[], str | None]
    """Returns why it is not as it was written; None if it is."""
    step: int | None = None
    is_vouched: bool = True


def file_checks(reader: RunReader) -> Iterator[FileCheck]:
    """Yield how each file is compared that is read again."""
    path, vouched, steps = reader.path, reader.vouched(), reader.step_numbers()
    yield FileCheck(SETTINGS, partial(settings_problem, path, reader.run().settings))
    yield FileCheck(STEPS, partial(_accounts_problem, reader))
    yield FileCheck(METRICS, partial(_metrics_problem, reader))
    for step in steps:
        yield from _of_step(path, step, vouched)
    yield from _later_files(path, frozenset(steps))
    for name in (ISOLATION, *GROWING_FILES):
        if name in GROWING_FILES and (known := vouched.of_growing(name)):
            yield FileCheck(name, partial(_growing_problem, path / name, known))
        elif name in vouched.run or (path / name).exists():
            yield _of_run(path, name, vouched)
    for name in sorted(vouched.run.keys() - {ISOLATION, *GROWING_FILES}):
        yield _of_run(path, name, vouched)
    for picture in sorted((path / PICTURES).glob("*")):
        if match := _PICTURE.fullmatch(picture.name):
            yield FileCheck(f"{PICTURES}/{picture.name}", partial(_picture_problem, picture, match[1]))
    for folder in (*checkpoint_folders(path), *export_folders(path)):
        yield from _of_checkpoint(path, folder)
    if os.path.lexists(path / TURNS):
        yield FileCheck(TURNS, partial(_turns_problem, path / TURNS))


def uncovered_files(path: Path, checked: set[str]) -> list[str]:
    """Return the files of a run that are not among those that are compared."""
    found = (str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())
    return sorted(name for name in found if name not in checked and not name.startswith(JOURNAL))


def _of_step(path: Path, step: int, vouched: Vouched) -> Iterator[FileCheck]:
    digests = vouched.steps.get(step, {})
    for folder in STEP_FOLDERS:
        file = step_file(path, folder, step)
        name, digest = f"{folder}/{file.name}", digests.get(folder)
        if digest is not None:
            yield FileCheck(name, partial(file_problem, file, digest), step)
        elif file.exists() and digests:
            yield FileCheck(name, lambda: "was not there when the step was made", step)
        elif file.exists():
            yield FileCheck(name, lambda: None, step, is_vouched=False)


def _later_files(path: Path, steps: frozenset[int]) -> Iterator[FileCheck]:
    """Yield files of steps that the journal does not have, but for the step that may have been under way."""
    under_way = max(steps, default=-1) + 1
    for folder in STEP_FOLDERS:
        for file in sorted((path / folder).glob("step-*")):
            number = file.stem.removeprefix("step-")
            if number.isdigit() and int(number) not in steps and int(number) != under_way:
                yield FileCheck(f"{folder}/{file.name}", lambda: "belongs to a step that the journal does not have")


def _of_run(path: Path, name: str, vouched: Vouched) -> FileCheck:
    if (digest := vouched.run.get(name)) is None:
        return FileCheck(name, lambda: None, is_vouched=False)
    return FileCheck(name, partial(file_problem, path / name, digest))


def _of_checkpoint(path: Path, folder: Path) -> Iterator[FileCheck]:
    found = sealed_problems(folder)
    files = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if not file.is_dir()}
    for own, file in files.items():
        yield FileCheck(str(file.relative_to(path)), partial(_same, found.get(own)), is_vouched=own in found)
    for name in sorted(found.keys() - files.keys()):
        yield FileCheck(str((folder / name).relative_to(path)), partial(_same, found[name]))


def _same(problem: str | None) -> str | None:
    return problem


def _accounts_problem(reader: RunReader) -> str | None:
    try:
        for _ in reader.records():
            pass
    except RunDirectoryError as error:
        return str(error).removeprefix(f"{reader.path / STEPS}: ")
    return None


def _metrics_problem(reader: RunReader) -> str | None:
    try:
        return metrics_problem(
            reader.path / METRICS, reader.records(), is_ended=reader.run().status is RunStatus.FINISHED
        )
    except RunDirectoryError:  # the accounts, which are told on their own
        return None


def _growing_problem(path: Path, known: dict[int, Digest]) -> str | None:
    whole = num_whole(path, list(known.values()))
    for step, digest in list(known.items())[whole:]:
        if problem := file_problem(path, digest, is_whole=False):
            before = "at the end of the run" if step == OF_RUN else f"before step {step}"
            return f"{problem}, in what was written {before}"
    return None


def _picture_problem(path: Path, expected: str) -> str | None:
    try:
        is_same = digest_of(path).sha256 == expected
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None if is_same else "is damaged: its name is the hash of other bytes"


def _turns_problem(path: Path) -> str | None:
    try:
        content = read_regular(path)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    whole = size_unsealed(content)
    if whole == len(content):
        return None
    lost = f"{len(content) - whole:,} bytes are not gone on with"
    return f"is damaged at byte {whole:,}, or was cut short by a kill: {lost}"

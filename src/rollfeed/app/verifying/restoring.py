"""Takes a run back to a step that is whole; what comes behind it is kept beside."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rollfeed.app.training.directory import checkpoint_folders
from rollfeed.base.atomic import Digest, replace_file, sealed_problems, sync
from rollfeed.errors import RunDirectoryError
from rollfeed.store.journal import Journal, StepEntry
from rollfeed.store.layout import (
    EXPORTS,
    GROWING_FILES,
    JOURNAL,
    METRICS,
    MODEL,
    SET_ASIDE,
    SETTINGS,
    STEP_FOLDERS,
    STEPS,
    TURNS,
    export_folders,
    exported_step,
    step_file,
)
from rollfeed.store.lock import RunLock
from rollfeed.store.run_directory import Rewind, check_kept, kept_steps, step_problem
from rollfeed.store.states import StateFiles
from rollfeed.store.step_log import MetricsFile, read_records_of
from rollfeed.store.vouching import num_whole, settings_text


def restore_run(directory: Path, step: int | None) -> Path:
    """Make ``step`` the last one of a run, or none of them, and return where all else of it is.

    Files of later steps, newer checkpoints and copies of what is shortened are put into a new folder below the
    directory; nothing is deleted. A kill leaves the run as it was, or set back.

    Raises:
        RunDirectoryError: If there is no such step, files up to it are not as they were written, the journal is
            damaged, or a process works on the run. Nothing has been changed then.
        OSError: If the disk refuses.
    """
    if not (directory / JOURNAL).is_file():
        raise RunDirectoryError(f"{directory}: holds no run; give the directory that `rollfeed run` wrote")
    lock = RunLock(directory)
    try:
        journal = Journal(directory / JOURNAL, read_only=False)
        try:
            return _restore(directory, journal, step)
        finally:
            journal.close()
    finally:
        lock.release()


def _restore(directory: Path, journal: Journal, step: int | None) -> Path:
    entries = journal.steps()
    back_to = Rewind.START if step is None else step
    if problem := step_problem(directory, entries, back_to):
        raise RunDirectoryError(problem)
    kept = kept_steps(entries, back_to)
    check_kept(directory, journal, kept)
    records = read_records_of(directory / STEPS, kept, None)
    if kept:
        StateFiles(directory).read(kept[-1])
    aside = _new_folder(directory / SET_ASIDE)
    later, vouched = entries[len(kept) :], journal.vouched()
    for name in (JOURNAL, f"{JOURNAL}-wal", STEPS, METRICS, SETTINGS, *GROWING_FILES):
        if (directory / name).exists():
            shutil.copyfile(directory / name, aside / name)
    files = _step_files(directory, later)
    for file in files:
        _link(file, aside / file.relative_to(directory))
    journal.forget(kept[-1].step + 1 if kept else 0, cause=_cause(step))
    for file in files:
        file.unlink()
    _move_trainer(directory, aside, step)
    for name in GROWING_FILES:
        _shorten(directory / name, list(vouched.of_growing(name).values()))
    # What the journal and the accounts say a second time.
    MetricsFile(directory / METRICS, committed=records).close()
    replace_file(directory / SETTINGS, lambda file: file.write(settings_text(journal.run().settings)))
    sync(directory)
    return aside


def _new_folder(parent: Path) -> Path:
    parent.mkdir(exist_ok=True)
    number = 1
    while (folder := parent / str(number)).exists():
        number += 1
    folder.mkdir()
    return folder


def _step_files(directory: Path, later: Sequence[StepEntry]) -> list[Path]:
    paths = (step_file(directory, folder, entry.step) for entry in later for folder in STEP_FOLDERS)
    return [path for path in paths if path.exists()]


def _link(file: Path, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, copy)
    except OSError:  # a disk without links
        shutil.copyfile(file, copy)


def _move_trainer(directory: Path, aside: Path, step: int | None) -> None:
    """Put away what comes of later steps than the one that is kept, and checkpoints that are not as they were written.

    That after the warm-up stays in any case: the steps were made from it.
    """
    for folder in checkpoint_folders(directory):
        number = folder.name.removeprefix("step-")
        if number.isdigit() and (step is None or int(number) > step or any(sealed_problems(folder).values())):
            (aside / folder.relative_to(directory)).parent.mkdir(exist_ok=True)
            folder.rename(aside / folder.relative_to(directory))
    for folder in export_folders(directory):
        if step is None or exported_step(folder) > step + 1:  # it names the number of batches
            (aside / EXPORTS).mkdir(exist_ok=True)
            folder.rename(aside / EXPORTS / folder.name)
    for name in (MODEL, TURNS):
        if (directory / name).exists():
            (directory / name).rename(aside / name)


def _shorten(path: Path, known: Sequence[Digest]) -> None:
    """Cut a file that grows where it stops being as it was written, if it does."""
    whole = num_whole(path, known)
    if path.exists() and whole < len(known):
        beginning = path.read_bytes()[: known[whole - 1].size if whole else 0]
        replace_file(path, lambda file: file.write(beginning))


def _cause(step: int | None) -> str:
    return f"taken back to {'its start' if step is None else f'step {step}'} by `rollfeed verify --restore`"

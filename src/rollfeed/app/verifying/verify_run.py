"""Recounts a run with the reader that everything else reads it with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollfeed.app.lint import lint
from rollfeed.app.verifying.file_checks import file_checks, uncovered_files
from rollfeed.app.verifying.recounting import GroupRecount
from rollfeed.app.verifying.verification import Recounted, Verification
from rollfeed.errors import RollfeedError, RunDirectoryError
from rollfeed.lint import Flaw
from rollfeed.store import RunReader
from rollfeed.store.layout import GROWING_FILES, JOURNAL


def verify_run(
    directory: Path, *, lints: bool = True, on_progress: Callable[[Verification], None] = lambda _: None
) -> Verification:
    """Compare all files of a run with their digests, and recount ledger, versions, numbers and masks.

    Nothing is written. With ``lints`` the samples are linted, too, without the model that sampled them.

    Raises:
        ConfigError: If there is no run in the directory.
    """
    found = Verification(directory=directory)
    try:
        reader = RunReader(directory)
    except RunDirectoryError as error:
        if not (directory / JOURNAL).is_file():
            raise
        found.add(Recounted.BYTES, JOURNAL, _told(error, directory / JOURNAL))
        return found
    with reader:
        good = _check_files(reader, found, on_progress)
        _recount(reader, found, on_progress)
        if lints and good:
            _lint(directory, found, on_progress)
        elif lints:
            found.unchecked.append("masks and versions of samples: files of steps are damaged")
    return found


def _check_files(reader: RunReader, found: Verification, on_progress: Callable[[Verification], None]) -> bool:
    """Compare files; return whether those of all steps are as they were written."""
    checked, broken = set[str](), set[int]()
    for check in file_checks(reader):
        checked.add(check.name)
        if (problem := check.problem()) is not None:
            found.add(Recounted.BYTES, check.name, problem, step=check.step)
            broken |= set() if check.step is None else {check.step}
        elif check.is_vouched:
            found.num_files += 1
            found.num_bytes += (reader.path / check.name).stat().st_size
        else:
            found.not_vouched.append(check.name)
        on_progress(found)
    vouched = reader.vouched()
    for name in GROWING_FILES:
        path, known = reader.path / name, vouched.of_growing(name)
        if known and path.exists() and path.stat().st_size > max(each.size for each in known.values()):
            found.not_vouched.append(f"{name} (what is newer than the last commit)")
    found.not_covered = uncovered_files(reader.path, checked)
    for step in reader.step_numbers():
        if step in broken:
            break
        found.last_good = step
    return not broken


def _recount(reader: RunReader, found: Verification, on_progress: Callable[[Verification], None]) -> None:
    recount, record = GroupRecount(found, reader.run().settings), None
    try:
        for record in reader.records():
            recount.step(record, reader.batch(record.step), reader.dropped(record.step))
            found.num_steps += 1
            on_progress(found)
        if record is not None:
            recount.finish(reader.state(record.step), record)
    except RunDirectoryError as error:
        if not found.by_kind[Recounted.BYTES]:  # a file that can be read no more, although nothing says so
            found.add(Recounted.BYTES, f"step {found.num_steps}", str(error))
        found.unchecked.append(f"ledger and numbers behind {found.num_steps} steps: a file is missing or damaged")


def _lint(directory: Path, found: Verification, on_progress: Callable[[Verification], None]) -> None:
    try:
        report = lint(directory, rescores=False, on_progress=lambda _: on_progress(found))
    except RollfeedError as error:
        found.unchecked.append(f"masks and versions of samples: {error}")
        return
    for each in report.findings:
        kind = Recounted.VERSIONS if each.kind is Flaw.VERSION_GAP else Recounted.MASKS
        place = ", ".join(str(part) for part in each.place if part is not None)
        found.add(kind, place, f"{each.kind}: {each.detail}")
    for what, count in report.unchecked.items():
        found.unchecked.append(f"{what} ({count} samples)")


def _told(error: RunDirectoryError, path: Path) -> str:
    return str(error).removeprefix(f"{path}: ")

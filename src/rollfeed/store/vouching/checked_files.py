"""Files of a run directory, each checked against its digest before it is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollfeed.base.atomic import Digest, NotRegularError, file_problem, open_regular, read_regular
from rollfeed.errors import RunDirectoryError
from rollfeed.store.layout import SETTINGS, step_file
from rollfeed.store.vouching.seals import OF_RUN, Vouched


class CheckedFiles:
    """Gives paths of files that are as they were written; one that has not been touched since is not read again.

    ``vouched`` returns the digests that its journal has now.

    Raises:
        RunDirectoryError: From all methods, if a file is missing or another one; names it and its step, and says what
            to do. Files without a digest, of earlier versions, are taken as they are.
    """

    def __init__(self, directory: Path, vouched: Callable[[], Vouched]) -> None:
        self._directory = directory
        self._vouched = vouched
        self._known: dict[Path, tuple[Any, ...]] = {}

    def of_step(self, folder: str, step: int) -> Path:
        """Return the file of a committed step in a folder."""
        path = step_file(self._directory, folder, step)
        self._check(path, self._vouched().steps.get(step, {}).get(folder), step)
        return path

    def growing(self, name: str, *, up_to: int | None = None) -> Path:
        """Return a file that grows, of which the beginning is checked, as far as it was when the last step was made.

        With ``up_to`` as far as it was at that step.
        """

        def find() -> dict[int, Digest]:
            known = self._vouched().of_growing(name)
            return {step: each for step, each in known.items() if up_to is None or 0 <= step <= up_to}

        path = self._directory / name
        while known := find():
            step, expected = max(known.items(), key=lambda each: each[1].size)
            try:
                self._check(path, expected, step, is_whole=False)
            except RunDirectoryError:
                # Another process may just have gone back to an earlier step.
                if find() == known:
                    raise
            else:
                break
        return path

    def of_run(self, name: str) -> Path:
        """Return a file that belongs to no step."""
        path = self._directory / name
        self._check(path, self._vouched().run.get(name), None)
        return path

    def _check(self, path: Path, expected: Digest | None, step: int | None, *, is_whole: bool = True) -> None:
        if expected is None:
            try:
                open_regular(path).close()
            except NotRegularError as error:
                raise RunDirectoryError(f"{path}: cannot be read: it is {error}; restore it from a copy") from None
            except OSError:  # whoever reads it says so
                pass
            return
        try:
            found = path.stat()
        except OSError:
            found = None
        state = None if found is None else (expected, found.st_ino, found.st_size, found.st_mtime_ns)
        if state is None or self._known.get(path) != state:
            if problem := file_problem(path, expected, is_whole=is_whole):
                raise RunDirectoryError(f"{path}: {problem}; {_remedy(self._directory, step)}")
            if state is not None:
                self._known[path] = state


def settings_text(settings: Mapping[str, Any]) -> bytes:
    """Return what settings.json has, given the journal's settings."""
    return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def settings_problem(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """Return why settings.json is not what the journal says; None if it is."""
    try:
        is_same = read_regular(directory / SETTINGS) == settings_text(settings)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None if is_same else "has other settings than the journal"


def _remedy(directory: Path, step: int | None) -> str:
    if step is None or step == OF_RUN:
        return "restore it from a copy"
    back = "start" if step == 0 else str(step - 1)
    return f"restore it from a copy, or go back to before step {step}: rollfeed verify {directory} --restore {back}"

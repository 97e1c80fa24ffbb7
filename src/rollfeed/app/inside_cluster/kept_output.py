"""Output of a process on a node, printed and logged, which is kept until the process of the run takes it."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from rollfeed.app.cluster.orders import LineLogged, OutputWritten
from rollfeed.logs import RUN_LOG
from rollfeed.store.layout import PRINTED

_PREFIX = "rollfeed-output-"
"""Before the number of the process."""
_MOST_BYTES = 1 << 20
_MOST_RECORDS = 1000


class KeptOutput(logging.Handler):
    """Files that workers' functions print and log into, and the last records of this process."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._records = deque[LineLogged](maxlen=_MOST_RECORDS)
        self._rest: list[OutputWritten | LineLogged] = []
        self._taken = {PRINTED: 0, RUN_LOG: 0}
        self.printed = _new_folder() / PRINTED
        """The file that gets what is printed; what processes of a pool log goes beside it."""

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep what is logged in this process, and what functions print in it."""
        ours = logging.getLogger("rollfeed")
        level = ours.level
        ours.addHandler(self)
        ours.setLevel(logging.INFO)
        try:
            file = self.printed.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
            with file, redirect_stdout(file):
                yield
        finally:
            ours.removeHandler(self)
            ours.setLevel(level)
            self.end()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._records.append(LineLogged(record.name, record.levelno, self.format(record)))
        except Exception:  # of the caller's arguments
            self.handleError(record)

    def take(self) -> list[OutputWritten | LineLogged]:
        """Return what is new, in whole lines, at most a megabyte a file; what is more comes with later calls."""
        taken, self._rest = self._rest, []
        taken += [self._records.popleft() for _ in range(len(self._records))]
        for name, start in self._taken.items():
            path = self.printed.with_name(name)
            if path.exists() and path.stat().st_size > start:
                with path.open("rb") as file:
                    file.seek(start)
                    new = file.read(_MOST_BYTES)
                lines = new if len(new) == _MOST_BYTES and b"\n" not in new else new[: new.rfind(b"\n") + 1]
                self._taken[name] += len(lines)
                taken += [OutputWritten(name, lines)] if lines else []
        return taken

    def end(self) -> None:
        """Remove the files; what is new in them is taken later."""
        self._rest = self.take()
        shutil.rmtree(self.printed.parent, ignore_errors=True)


def _new_folder() -> Path:
    """Return an empty folder, and remove those of processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        if not Path("/proc", path.name.removeprefix(_PREFIX).partition("-")[0]).exists():
            shutil.rmtree(path, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))

"""The log of a run: a file in its directory with the times and levels of all that is logged while it goes on.

Invariant: nothing that happens to the file ends a run; that it cannot be written is told once.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler, WatchedFileHandler
from pathlib import Path

RUN_LOG = "run.log"
RUN_LOGS = (RUN_LOG, f"{RUN_LOG}.1")
"""The file, and the one before it, which goes when the next one is full."""
_MAX_BYTES = 16 << 20
_MAX_EARLY = 1000
_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_DATE = "%Y-%m-%dT%H:%M:%S%z"

progress = logging.getLogger("rollfeed.progress")
"""For lines that are for the file only, as a terminal shows the same otherwise."""
progress.propagate = False


class EarlyRecords(logging.Handler):
    """Keeps what is logged before there is a run directory; the last of it, where it is much."""

    def __init__(self) -> None:
        super().__init__()
        self.records = deque[logging.LogRecord](maxlen=_MAX_EARLY)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class _Lines(logging.Formatter):
    """Formats records, also those whose arguments do not fit their text."""

    def format(self, record: logging.LogRecord) -> str:
        try:
            return super().format(record)
        except Exception as error:  # of the caller's arguments
            text = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
            told = {"msg": f"{text} (its arguments do not fit: {type(error).__name__})", "args": None}
            return super().format(logging.makeLogRecord(record.__dict__ | told))


class _RunLogFile(RotatingFileHandler):
    def __init__(self, path: Path) -> None:
        # Opened with the first record, so that a failure is one of writing.
        super().__init__(
            path, maxBytes=_MAX_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace", delay=True
        )
        self.setLevel(logging.INFO)
        self.setFormatter(_Lines(_FORM, _DATE))
        self._has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not self._has_failed:
            self._has_failed = True
            error = sys.exc_info()[1]
            cause = error.strerror if isinstance(error, OSError) and error.strerror else error
            print(f"{self.baseFilename}: cannot be written: {cause}; the run goes on without it", file=sys.stderr)


class _Otherwise(logging.Handler):
    """Prints what Python would print if the root logger had no handler."""

    def emit(self, record: logging.LogRecord) -> None:
        ours = record.name.partition(".")[0] == "rollfeed" and bool(logging.getLogger("rollfeed").handlers)
        if logging.lastResort is not None and not ours and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)


@contextmanager
def run_log(folder: Path) -> Iterator[None]:
    """Append to the log in a folder what is logged in this process while the block runs, and what is kept from before.

    Records of other libraries are among it; ``rollfeed``'s logger decides from which level on its own are.
    """
    root, ours, file = logging.getLogger(), logging.getLogger("rollfeed"), _RunLogFile(folder / RUN_LOG)
    added: list[logging.Handler] = [file] if root.handlers else [file, _Otherwise()]
    for early in [each for each in ours.handlers if isinstance(each, EarlyRecords)]:
        ours.removeHandler(early)
        for record in early.records:
            file.handle(record)
    for handler in added:
        root.addHandler(handler)
    progress.addHandler(file)
    progress.setLevel(logging.INFO)
    try:
        yield
    finally:
        progress.removeHandler(file)
        for handler in added:
            root.removeHandler(handler)
        with suppress(OSError):
            file.close()


def log_in_worker(path: Path) -> None:
    """Append to the log of a run what a worker process logs, beside what it prints of that; errors are passed over."""
    file = WatchedFileHandler(path, encoding="utf-8", errors="backslashreplace", delay=True)
    file.setFormatter(_Lines(_FORM.replace("%(name)s", "%(name)s (worker %(process)d)"), _DATE))
    file.handleError = lambda record: None  # type: ignore[method-assign]
    root = logging.getLogger()
    for handler in (file,) if root.handlers else (file, _Otherwise()):
        root.addHandler(handler)

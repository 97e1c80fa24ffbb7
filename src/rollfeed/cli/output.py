"""Standard output and error that cannot end a command.

What a stream's encoding does not have is written as an escape. When the reader of a stream has gone, as with
``| head``, or its disk is full, what is printed to it is dropped and the command goes on.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any, TextIO

_READER_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)


def open_output() -> None:
    """Put such streams in the place of this process's; called once, before anything is printed."""
    for descriptor in range(3):
        # A file opened later would get the number of a closed stream, and what is printed.
        if not _is_open(descriptor):
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _lenient(sys.stdout, 1)
    sys.stderr = _lenient(sys.stderr, 2)


def close_output() -> str | None:
    """Write what waits; return why not all of standard output was written, though there is somebody to read it."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    failure = raw.failure if isinstance(raw, _LenientFile) else None
    return None if failure is None or failure.errno in _READER_GONE else os.strerror(failure.errno or 0)


class _LenientFile(io.RawIOBase):
    """A file descriptor; after the first write that fails, all are dropped."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.failure: OSError | None = None
        self.name = name
        self.mode = "w"
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        while self.failure is None:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:  # a terminal that another program has made so
                select.select([], [self._descriptor], [])
            except OSError as error:
                self.failure = error
        return len(data)


def _lenient(stream: TextIO | None, descriptor: int) -> io.TextIOWrapper:
    encoding = stream.encoding if stream is not None else "utf-8"
    file = _LenientFile(descriptor, "<stderr>" if descriptor == 2 else "<stdout>")
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=descriptor == 2 or file.isatty(),
        write_through=bool(getattr(stream, "write_through", False)),
    )


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True

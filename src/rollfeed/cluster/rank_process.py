"""One of several processes of this host that are called alike.

``python -m rollfeed.cluster.rank_process SOCKET PARENT``

It is told through a socket of the filesystem what object it hosts, and which methods to call; it ends when the other
end of the socket is closed, or when the process PARENT is no longer its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from rollfeed.cluster.hosting import Hosted, Outcome

_LOOK_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


class RankAnswer(NamedTuple):
    """The end of a call, with what was logged until then."""

    outcome: Outcome
    records: list[tuple[str, int, str]]
    """Logger, level and text."""


class _UnsentRecords(logging.Handler):
    """Records until they are sent."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.name, record.levelno, self.format(record)))


def log_of(folder: Path, rank: int) -> Path:
    """Return the file that gets what a rank prints."""
    return folder / f"rank-{rank}.log"


def connect(path: str) -> Connection:
    """Return the connection to whoever has a socket there."""
    own = socket.socket(socket.AF_UNIX)
    own.connect(path)
    return Connection(own.detach())


def end_with(parent: int) -> None:
    """End this process, whatever it does then, when it is no longer a child of ``parent``."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


async def serve(connection: Connection) -> None:
    """Answer calls, one after the other, until there are no more."""
    kept, ours = _UnsentRecords(), logging.getLogger("rollfeed")
    ours.addHandler(kept)
    ours.setLevel(logging.INFO)
    hosted: Hosted | None = None
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            given: Any = connection.recv()
            if hosted is None:
                hosted = Hosted(*given)
                continue
            method, args = given
            outcome = await hosted.call(method, *args)
            records, kept.records = kept.records, []
            connection.send(RankAnswer(outcome, records))


def main() -> None:
    """Serve, and end without waiting for others, who may be gone."""
    end_with(int(sys.argv[2]))
    rank = int(os.environ["RANK"])
    with log_of(Path(sys.argv[1]).parent, rank).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    connection = connect(sys.argv[1])
    connection.send(rank)
    asyncio.run(serve(connection))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    # What is sent has to be of the module that the other end knows.
    from rollfeed.cluster import rank_process

    rank_process.main()

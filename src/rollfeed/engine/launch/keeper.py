"""Keeps one server, and ends it with everything that it started when whoever asked for it is gone.

Run as a program of its own, with the standard library only: ``python -I -S keeper.py PARENT GRACE WORDS...``. It ends
the server when its standard input is closed or when the process PARENT is no longer its parent, so that nothing is
left running after a ``kill -9`` either. Processes that the server's leave behind, in sessions of their own too, become
children of this one, and are ended with them. Its exit code is the server's; 128 and its number for a signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

NOT_STARTED = 127
"""Exit code where the program cannot be started."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_SECONDS = 0.1
_AFTER_DEATH_SECONDS = 1.0
"""For processes of a server that has ended by itself."""
GIVING_UP_SECONDS = 30.0
"""After which processes that even SIGKILL does not end are left to the kernel."""


def main() -> int:
    """Start the server, and return its exit code when all of it has ended."""
    parent, grace_seconds, words = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ending = False

    def end(*_: object) -> None:
        nonlocal ending
        ending = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    try:
        server = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return NOT_STARTED
    code = None
    while code is None and not ending:
        closed, _, _ = select.select([0], [], [], _LOOK_SECONDS)
        code = _reap(server.pid)
        ending = ending or bool(closed) or os.getppid() != parent
    if code is None:
        code = _end(server.pid, grace_seconds)
    _end(None, _AFTER_DEATH_SECONDS)
    return code


def _end(server: int | None, grace_seconds: float) -> int:
    """End the server, which is told so before the rest is killed, or all that is left; return its exit code."""
    for pid in [server] if server is not None else _descendants():
        _tell(pid, signal.SIGTERM)
    code, begun = 128 + signal.SIGKILL, time.monotonic()
    given_up = grace_seconds + GIVING_UP_SECONDS
    # Looked twice: a process whose parent ends while they are looked at is below nobody then.
    while (left := _descendants() or _descendants()) and (waited := time.monotonic() - begun) < given_up:
        if waited > grace_seconds:
            for pid in left:
                _tell(pid, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS / 4)
        if (found := _reap(server)) is not None:
            code = found
    found = _reap(server)
    return code if found is None else found


def _reap(server: int | None) -> int | None:
    """Take the exit codes of children that have ended; return the server's where it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == server:
                code = os.waitstatus_to_exitcode(ended[1])
    return code if code is None or code >= 0 else 128 - code


def _descendants() -> list[int]:
    """Return the processes below this one that have not ended."""
    children = defaultdict[int, list[int]](list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children[int(parent)].append(int(path.parent.name))
    found = [os.getpid()]
    for pid in found:
        found += children[pid]
    return found[1:]


def _tell(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())

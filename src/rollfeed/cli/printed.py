"""Shows what functions of the user print in workers, while a run goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

_POLL_SECONDS = 0.3


@contextmanager
def printed_lines(path: Path, console: Console, *, verbose: bool) -> Iterator[None]:
    """Print the lines that come into a file while the block runs, if ``verbose``; those of before are not shown."""
    if not verbose:
        yield
        return
    follower = _Follower(path, console)
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_POLL_SECONDS):
            follower.show(whole=True)

    thread = threading.Thread(target=follow, name="rollfeed-printed", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        follower.show(whole=False)


class _Follower:
    def __init__(self, path: Path, console: Console) -> None:
        self._path = path
        self._console = console
        self._position = path.stat().st_size if path.exists() else 0

    def show(self, *, whole: bool) -> None:
        """Print what is new, as far as the last line is ``whole``."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._position:  # another run has taken its place
                    self._position = 0
                file.seek(self._position)
                new = file.read()
        except OSError:
            return
        if whole:
            new = new[: new.rfind(b"\n") + 1]
        self._position += len(new)
        for line in new.decode("utf-8", "replace").splitlines():
            self._console.print(f"printed  {line}")

"""Go back to step 2 in copies of the run given, RUN-1, RUN-2, ...: the n-th dies before the n-th change to a file.

The last one is done before it dies.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

from rollfeed.store import RunDirectory

CHANGES = {"os.remove", "os.rename", "os.truncate", "os.mkdir", "open", "sqlite3.connect"}


def rewind(path: Path, fatal: int) -> None:
    seen = 0

    def die_at_last(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in CHANGES and str(path) in str(arguments[0]):
            seen += 1
            if seen == fatal:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die_at_last)
    RunDirectory.open(path, settings={}, identity={"seed": 1}, overwrite=False, step=2).close()


def main(run: Path) -> None:
    for fatal in count(1):
        copy = run.with_name(f"{run.name}-{fatal}")
        shutil.copytree(run, copy)
        child = os.fork()
        if not child:
            rewind(copy, fatal)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return


main(Path(sys.argv[1]))

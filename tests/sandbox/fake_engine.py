"""A stand-in for ``docker``: containers are folders, and what is executed in them are this machine's programs.

It never carries out the adapter's "kill everything inside", since there is no inside: it only notes it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

STATE = Path(sys.argv[1])
VERB, *ARGUMENTS = sys.argv[2:]


def note(entry: list[str]) -> None:
    with open(STATE / "log", "a", encoding="utf-8") as log:
        log.write(json.dumps(entry) + "\n")


def container(name: str) -> Path:
    folder = STATE / name
    if not name.startswith("rollfeed-") or not folder.is_dir():
        sys.exit(f"Error: No such container: {name}")
    return folder


note([VERB, *ARGUMENTS])
if (STATE / "broken").exists():
    sys.exit("Cannot connect to the daemon")
if VERB == "run":
    (STATE / ARGUMENTS[ARGUMENTS.index("--name") + 1]).mkdir()
    print("0123456789abcdef")
elif VERB == "rm":
    shutil.rmtree(container(ARGUMENTS[-1]))
elif VERB == "exec":
    _, name, *command = ARGUMENTS
    os.chdir(container(name))
    if any("kill" in word for word in command):
        sys.exit(0)
    os.execvp(command[0], command)
else:
    sys.exit(f"unknown command {VERB}")

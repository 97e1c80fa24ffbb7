"""Functions that the tests call in workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_HELD: list[bytearray] = []


def is_seven(answer: str) -> dict[str, Any]:
    return {"answer": answer, "is_right": answer == "7"}


def echo(value: Any) -> Any:
    return value


def pid() -> int:
    return os.getpid()


def talk(folder: str, mine: str, others: str) -> None:
    """Print a line, and the other call another one, while both are under way."""
    print("I", "am", end=" ")
    Path(folder, mine).touch()
    while not Path(folder, others).exists():
        time.sleep(0.01)
    print(mine)
    print("no end", end="")


def noisy(value: Any) -> Any:
    print("printed", flush=True)
    sys.stderr.write("and complained\n")
    for descriptor in (1, 2):
        os.write(descriptor, b"\x00\x00\x00\x05hello" * 1000)
    return value


def read_stdin() -> str:
    return sys.stdin.read()


def bomb() -> int:
    blocks = []
    while True:
        blocks.append(bytearray(64 * 1024**2))


def hold(num_bytes: int) -> int:
    _HELD.append(bytearray(num_bytes))
    return os.getpid()


def stop_itself() -> None:
    sys.exit(3)


def end_at_once() -> None:
    os._exit(3)


def close_everything() -> None:
    os.closerange(0, 256)


def leave_child() -> int:
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"]).pid


def die_and_leave_child(path: str) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])
    with open(path, "w", encoding="ascii") as file:
        file.write(str(child.pid))
    os.abort()


def write_then_hang(path: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    time.sleep(3600)


async def coroutine() -> None:
    """Cannot be called in a worker."""


def loaded_modules() -> list[str]:
    return sorted(sys.modules)


NOT_A_FUNCTION = 3


def log_and_print(text: str) -> None:
    import logging

    logging.getLogger("mine").warning("%s is odd", text)
    print(text)

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _tasks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.fixture
def gone() -> Callable[[int], bool]:
    """Return the function that waits for another process's end, which nothing here is told of."""

    def wait(pid: int) -> bool:
        for _ in range(3000):
            try:
                stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            except OSError:
                return True
            if stat.rpartition(")")[2].split()[0] in "ZX":
                return True
            time.sleep(0.02)
        return False

    return wait

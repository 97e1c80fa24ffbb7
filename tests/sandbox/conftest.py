from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rollfeed.errors import ConfigError
from rollfeed.protocols import IsolationLevel
from rollfeed.sandbox import LocalSandboxes, start_sandboxes


@pytest.fixture(params=[None, IsolationLevel.NAMESPACES], ids=["in-force", "namespaces"])
async def sandboxes(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LocalSandboxes]:
    """The machine's sandboxes, at the level in force and at the next one; whatever happens, no folder is left."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    try:
        made = await start_sandboxes(level=request.param, scratch=scratch)
    except ConfigError as error:
        if request.param is None:
            raise
        pytest.skip(str(error))
    if request.param is None and os.environ.get(
        "CI"
    ):  # where a weaker level must not pass for the one that is built on
        assert made.isolation.level is IsolationLevel.BUBBLEWRAP, str(made.isolation)
    yield made
    assert list(scratch.iterdir()) == []


@pytest.fixture
def processes_with() -> Callable[[str], list[int]]:
    """Return the function that finds processes, of whatever namespace, by what their command line contains.

    Killed processes take a moment to go, and nothing here is told of it.
    """

    def look(text: str) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if text in (entry / "cmdline").read_text(errors="replace"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def wait(text: str) -> list[int]:
        for _ in range(250):
            if not look(text):
                return []
            time.sleep(0.02)
        return look(text)

    return wait


@pytest.fixture
def zombies() -> Callable[[], list[int]]:
    """Return the function that lists the dead children that this process has not waited for."""

    def look() -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                except OSError:
                    continue
                if words[0] == "Z" and int(words[1]) == os.getpid():
                    found.append(int(entry.name))
        return found

    return look

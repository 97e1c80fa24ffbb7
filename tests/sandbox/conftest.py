from __future__ import annotations

import asyncio
import os
import sys
import tempfile
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
        for _ in range(3_000):
            if not look(text):
                return []
            time.sleep(0.02)
        return look(text)

    return wait


@pytest.fixture
def zombies() -> Callable[[], list[int]]:
    """Return the function that lists the dead children of the test that this process has not waited for."""

    def look() -> set[int]:
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                except OSError:
                    continue
                if words[0] == "Z" and int(words[1]) == os.getpid():
                    found.add(int(entry.name))
        return found

    before = look()
    return lambda: sorted(look() - before)


@pytest.fixture(params=[IsolationLevel.BUBBLEWRAP, IsolationLevel.NAMESPACES, IsolationLevel.LIMITS], ids=str)
async def at_level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalSandboxes]:
    """Sandboxes at each level of this machine's own that holds here."""
    if request.param is IsolationLevel.LIMITS and os.geteuid() == 0:
        # Programs are another user there, who need not be able to reach the interpreter that runs the tests.
        monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        await asyncio.to_thread(scratch.chmod, 0o711)
        try:
            made = await start_sandboxes(level=request.param, scratch=scratch)
        except ConfigError as error:
            pytest.skip(str(error))
        yield made
        assert os.listdir(scratch) == []

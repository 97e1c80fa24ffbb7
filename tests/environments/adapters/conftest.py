"""Workers, and stand-ins for packages that adapters import."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest

from rollfeed.environments.adapters import entries
from rollfeed.workers import WorkerPool


@pytest.fixture
async def workers() -> AsyncIterator[WorkerPool]:
    async with WorkerPool(num_workers=1) as pool:
        yield pool


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Mapping[str, str]], None]]:
    """Install a package of these files; nobody has asked for its names before."""

    def write(package: str, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        entries.known_names.cache_clear()

    yield write
    entries.known_names.cache_clear()

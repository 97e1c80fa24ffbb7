from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollfeed.environments.making import PooledTaskMaker, describe_environments
from rollfeed.environments.registry import named_by_path
from rollfeed.protocols import Workers

MakeMaker = Callable[..., Any]


@pytest.fixture(autouse=True)
def nothing_is_named_by_path() -> Iterator[None]:
    yield
    named_by_path.clear()


@pytest.fixture
def moody_maker() -> MakeMaker:
    """Return an async factory of what makes the problems of ``moody.py`` in given workers."""

    async def make(
        workers: Workers, *, name: str = "Moody", deadline_seconds: float = 30.0, **parameters: Any
    ) -> PooledTaskMaker:
        chosen = [(f"moody.py:{name}", parameters)]
        (facts,) = await describe_environments(chosen, workers=workers, folders=[Path(__file__).parent])
        return PooledTaskMaker(
            facts,
            run_seed=5,
            parameters=parameters,
            workers=workers,
            turns=asyncio.Semaphore(2),
            deadline_seconds=deadline_seconds,
        )

    return make

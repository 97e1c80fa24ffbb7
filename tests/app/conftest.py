from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rollfeed.app.rewards import RewardServices
from rollfeed.config import RewardSettings, WorkerSettings
from rollfeed.protocols import Isolation

HERE = Path(__file__).parent


@pytest.fixture
def folders() -> list[Path]:
    """Where the reward functions of these tests are."""
    return [HERE]


@pytest.fixture
def make_services() -> Callable[..., RewardServices]:
    """Return a factory of services; keyword arguments are settings of workers."""

    def make(on_isolation: Callable[[Isolation], None] | None = None, **workers: Any) -> RewardServices:
        settings = RewardSettings(workers=WorkerSettings(**{"timeout_seconds": 60.0, **workers}))
        services = RewardServices(settings, rm_types=[])
        services.on_isolation = on_isolation
        return services

    return make


@pytest.fixture
async def services(leaves_no_process: None, make_services: Callable[..., RewardServices]) -> AsyncIterator[Any]:
    """Services with two workers."""
    async with make_services(num_workers=2) as made:
        yield made

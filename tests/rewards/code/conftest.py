from __future__ import annotations

import pytest

from rollfeed.protocols import ExecLimits, Isolation
from rollfeed.rewards.code.grader import CodeGrader
from rollfeed.sandbox import LocalSandboxes, start_sandboxes

FOUND: list[Isolation] = []
"""The level in force, which is found out once a process."""


@pytest.fixture
async def grader() -> CodeGrader:
    """Return a grader with real sandboxes at the level in force."""
    if not FOUND:
        FOUND.append((await start_sandboxes()).isolation)
    return CodeGrader(sandboxes=LocalSandboxes(isolation=FOUND[0], max_running=2), limits=ExecLimits())

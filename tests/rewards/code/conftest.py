from __future__ import annotations

import pytest

from rollfeed.protocols import ExecLimits
from rollfeed.rewards.code.grader import CodeGrader
from rollfeed.sandbox import start_sandboxes


@pytest.fixture
async def grader() -> CodeGrader:
    """Return a grader with real sandboxes at the level in force."""
    return CodeGrader(sandboxes=await start_sandboxes(), limits=ExecLimits())

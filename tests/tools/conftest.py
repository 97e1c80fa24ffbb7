from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from rollfeed.config.tools import ToolSettings
from rollfeed.tools import LimitedToolbox


class OneTool:
    """A tool that does what a test says."""

    name = "one"
    description = "does something"
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "how": {"type": "string", "enum": ["a", "b"]}},
        "required": ["x"],
    }
    is_idempotent = False

    def __init__(self, do: Callable[[Mapping[str, Any]], Any]) -> None:
        self._do = do

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        return await self._do(arguments)


@pytest.fixture
def box_of() -> Callable[..., LimitedToolbox]:
    def make(*tools: Any, **limits: Any) -> LimitedToolbox:
        given = {"timeout_seconds": 30.0, "max_output_chars": 100, **limits}
        return LimitedToolbox(tools, ToolSettings(max_turns=8, max_seconds=60.0, **given))

    return make

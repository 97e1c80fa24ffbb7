"""The tools of a run: whatever one does becomes an answer or a failure, in time and of bounded length."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollfeed.config.tools import ToolSettings
from rollfeed.conversations import fit_arguments
from rollfeed.errors import ConfigError, RollfeedError, ToolError, in_one_line, suggestion
from rollfeed.protocols import CallFormat, Tool, ToolAnswer, ToolFailure
from rollfeed.types.text import well_formed

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_END_SECONDS = 5.0
"""How long calls that are under way are waited for when the box is closed."""


class LimitedToolbox:
    """Fits :class:`rollfeed.protocols.Toolbox`; leave it with ``async with``, which ends what tools have started.

    Raises:
        ConfigError: If two tools have one name, or a name is none.
    """

    def __init__(self, tools: Sequence[Tool], settings: ToolSettings) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if not _NAME.fullmatch(tool.name):
                raise ConfigError(f"tool {tool.name!r:.80}: a name has letters, digits, _, . and - only")
            if tool.name in self._tools:
                raise ConfigError(f"two tools are called {tool.name!r}: remove one from tools.use or [[tools.mcp]]")
            self._tools[tool.name] = tool
        self.definitions = tuple(
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
            }
            for tool in tools
        )
        self.call_format: CallFormat = settings.call_format
        self.max_turns: int = settings.max_turns
        self.max_seconds: float = settings.max_seconds
        self._settings = settings
        self._running: set[asyncio.Task[ToolAnswer | ToolFailure]] = set()
        self._complained: set[str] = set()

    async def __aenter__(self) -> LimitedToolbox:
        """Start nothing: tools start what they need when they are first called."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=_END_SECONDS)
        for tool in self._tools.values():
            if (close := getattr(tool, "aclose", None)) is not None:
                await close()

    def is_idempotent(self, name: str) -> bool:
        """Whether a tool's call may be made again; not where there is no such tool."""
        return name in self._tools and self._tools[name].is_idempotent

    def fitted(self, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any] | ToolFailure:
        if name not in self._tools:
            return ToolFailure(f"there is no tool {name!r:.80}; {suggestion(name, self._tools)}")
        fitted = fit_arguments(self._tools[name].parameters, arguments)
        return ToolFailure(f"{name}: {fitted}") if isinstance(fitted, str) else fitted

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer | ToolFailure:
        tool = self._tools[name]
        task = asyncio.create_task(self._answer(tool, arguments), name=f"tool {name}")
        # A tool may not let itself be cancelled: then it is left, and not waited for before the end.
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        limit = None if getattr(tool, "keeps_time", False) else self._settings.timeout_seconds
        try:
            await asyncio.wait({task}, timeout=limit)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            task.cancel()
            return ToolFailure(f"{name} gave no answer within {self._settings.timeout_seconds:g} s")
        return ToolFailure(f"{name} was interrupted") if task.cancelled() else task.result()

    async def _answer(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolAnswer | ToolFailure:
        try:
            given = await tool.call(arguments)
        except ToolError as error:
            return ToolFailure(self._cut(str(error)))
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # whatever a tool raises is told to the policy
            cause = str(error) if isinstance(error, RollfeedError) else in_one_line(error)
            if tool.name not in self._complained:
                self._complained.add(tool.name)
                _log.warning("tool %s failed, of which policies are told: %s", tool.name, cause)
            return ToolFailure(self._cut(f"{tool.name} failed: {cause}"))
        if isinstance(given, str):
            return ToolAnswer(self._cut(given))
        if (shown := _pictures(given)) is not None:
            return ToolAnswer(self._cut("\n".join(part["text"] for part in given if part["type"] == "text")), shown)
        try:
            return ToolAnswer(self._cut(json.dumps(given, ensure_ascii=False)))
        except (TypeError, ValueError, RecursionError):
            return ToolFailure(f"{tool.name} gave a {type(given).__name__}, which is no text")

    def _cut(self, text: str) -> str:
        left_out = len(text) - self._settings.max_output_chars
        if left_out > 0:
            half = self._settings.max_output_chars // 2
            text = f"{text[:half]}\n[{left_out:,} characters are left out]\n{text[len(text) - half :]}"
        return well_formed(text)


def _pictures(given: Any) -> tuple[str, ...] | None:
    """Return the pictures of an answer in parts, texts and ``{"type": "image", "image": URI}``; None for any other."""
    if not isinstance(given, list) or not all(isinstance(part, Mapping) for part in given):
        return None
    kinds = [part.get("type") for part in given]
    if "image" not in kinds or not all(kind in ("text", "image") for kind in kinds):
        return None
    if not all(isinstance(part.get(kind), str) for part, kind in zip(given, kinds, strict=True)):
        return None
    return tuple(part["image"] for part in given if part["type"] == "image")

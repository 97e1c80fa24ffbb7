"""Functions of users as tools: named, described and typed by their own signature."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, PydanticUserError, create_model

from rollfeed.base.importing import import_in_worker, is_async
from rollfeed.errors import PluginError, ToolError, WorkerCallError, WorkerTimeoutError
from rollfeed.protocols import Workers

_CALL = "rollfeed.tools.own_functions.call_function"


class FunctionTool:
    """Fits :class:`rollfeed.protocols.Tool`. A function that has ``is_idempotent = True`` as attribute is so.

    One that is not async and is named by its path is called in a process that can be killed; one that is handed over
    is called in a thread.

    Its parameters are annotated, and its docstring is for the policy; calls are made by ``workers``, which can be
    killed.

    Raises:
        PluginError: If its parameters cannot be described.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        path: str | None,
        folders: Sequence[Path],
        workers: Workers,
        timeout_seconds: float,
    ) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self.description = inspect.getdoc(function) or self.name
        self.parameters = _parameters(function, path or self.name)
        self.is_idempotent = bool(getattr(function, "is_idempotent", False))
        self._function = function
        self._path = None if is_async(function) else path
        self.keeps_time = self._path is not None
        self._folders = [str(folder) for folder in folders]
        self._workers = workers
        self._timeout_seconds = timeout_seconds

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """Return what the function returns. Raises ToolError if it was not done in time, or what it raised."""
        if is_async(self._function):
            return await self._function(**arguments)
        if self._path is None:
            return await asyncio.to_thread(self._function, **arguments)
        try:
            return await self._workers.call(
                _CALL, [self._path, self._folders, dict(arguments)], deadline_seconds=self._timeout_seconds
            )
        except WorkerTimeoutError:
            raise ToolError(f"{self.name} gave no answer within {self._timeout_seconds:g} s") from None
        except WorkerCallError as error:
            raise ToolError(f"{self.name} failed: {error}") from error


def call_function(path: str, folders: list[str], arguments: dict[str, Any]) -> Any:
    """Call a tool's function; runs in a worker."""
    return import_in_worker(path, key="tool", folders=folders)(**arguments)


def _parameters(function: Callable[..., Any], where: str) -> dict[str, Any]:
    try:
        hints = get_type_hints(function)
        fields: dict[str, Any] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise PluginError(f"tools.use: {where}: parameter {name!r} cannot be given by its name")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints.get(name, Any), default)
        model = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
        schema = model.model_json_schema()
    except (NameError, TypeError, ValueError, PydanticUserError) as error:
        if isinstance(error, PluginError):
            raise
        raise PluginError(f"tools.use: {where}: its parameters cannot be described: {error}") from error
    return {key: value for key, value in schema.items() if key != "title"}

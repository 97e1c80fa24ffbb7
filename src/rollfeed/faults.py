"""Says of a user's function that it raised, or returned something else than it promised, while a run went on.

It is one line: the setting, the function, what happened, and the file and line of the user's to look at.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
from asyncio import CancelledError, current_task, events
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rollfeed.errors import AgentError, ConfigError, EngineError, RollfeedError, RunFailedError

_OWN = f"{Path(__file__).resolve().parent}{os.sep}"
_LIBRARIES = tuple(
    f"{os.path.realpath(sysconfig.get_path(name))}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_MAX_CHARACTERS = 1_000


def blaming(setting: str, function: object) -> AbstractContextManager[None]:
    """Turn what a user's function raises in a block into the end of the run.

    Args:
        setting: Names the function, for example ``plugins.advantage``.
        function: Is called in the block. What one of rollfeed's own raises by mistake is left as it is.

    Raises:
        RunFailedError: With setting, function, error, and the innermost line of the user's own.
    """
    return _Blame(setting, function)


class _Blame(AbstractContextManager[None]):
    """A block that calls a user's function; thousands are under way at once, and a generator would be three objects."""

    __slots__ = ("_function", "_setting")

    def __init__(self, setting: str, function: object) -> None:
        self._setting, self._function = setting, function

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception | SystemExit | KeyboardInterrupt | CancelledError):
            return
        if isinstance(error, RunFailedError | EngineError | AgentError) or _is_cancelled(error):
            return
        if is_own(self._function) and not isinstance(error, RollfeedError):
            return
        raise RunFailedError(f"{_named(self._setting, self._function)}: {describe(error, self._function)}") from error


@contextmanager
def once_started() -> Iterator[None]:
    """Turn a ConfigError, which says that nothing has been started, into the end of the run that has been.

    Raises:
        RunFailedError: With what it said.
    """
    try:
        yield
    except ConfigError as error:
        raise RunFailedError(str(error)) from error


def complaint(setting: str, function: object, text: str) -> RunFailedError:
    """Return the error for a function that broke its promise: ``text`` says how, and what it must do."""
    place, text = _definition(function), " ".join(text.split())  # arrays are several lines
    return RunFailedError(f"{_named(setting, function)} {text}{f' ({place})' if place else ''}")


def attributed(setting: str, function: object, text: str) -> str:
    """Return what is wrong with a function's result, with its setting, its name and where it is."""
    place = _definition(function)
    is_placed = place is None or f"{place.rpartition(':')[0]}:" in text
    return f"{_named(setting, function)}: {text}{'' if is_placed else f' ({place})'}"


def describe(error: BaseException, function: object = None) -> str:
    """Return what was raised, on one line, and where in the user's own code, if it was there.

    Args:
        error: As it was caught; of a group of errors the first counts.
        function: The user's function that was called; its definition is named where no line of theirs is known.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())[:_MAX_CHARACTERS]
    if not isinstance(error, RollfeedError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    elif isinstance(error, RunFailedError):
        return text
    place = _innermost(error, function) or _definition(function)
    return f"{text} ({place})" if place else text


def innermost_line(frame: FrameType | None) -> str:
    """Return where a running call of the event loop is, as ``file.py:3, in f``: in the user's own code, if it is there.

    Args:
        frame: The innermost of the thread that the loop runs in; None where that has ended.
    """
    stack = traceback.extract_stack(frame) if frame is not None else []
    first = max((place for place, each in enumerate(stack) if each.filename == events.__file__), default=-1) + 1
    called = stack[first:]
    if not called:
        return "something"
    found = next((each for each in reversed(called) if _is_users(each.filename)), called[-1])
    return f"{_shown(found.filename)}:{found.lineno}, in {found.name}"


def name_of(function: object) -> str:
    """Return ``module:name`` of a function, of what a partial calls, or of an object's class."""
    found = _unwrapped(function)
    return f"{found.__module__}:{found.__qualname__}"


def is_own(function: object) -> bool:
    """Whether a function, or an object with methods, is of rollfeed itself and not a user's."""
    module = getattr(_unwrapped(function), "__module__", None) or ""
    return module.partition(".")[0] == "rollfeed"


def _is_cancelled(error: BaseException) -> bool:
    """Whether somebody cancelled this task; a function may raise CancelledError as well."""
    if not isinstance(error, CancelledError):
        return False
    try:
        task = current_task()
    except RuntimeError:  # in a thread without a loop there is no task to be cancelled
        return False
    return task is None or task.cancelling() > 0


def _named(setting: str, function: object) -> str:
    if is_own(function):
        return setting
    return f"{setting} ({name_of(function)})"


def _innermost(error: BaseException, function: object) -> str | None:
    frames = traceback.extract_tb(error.__traceback__)
    here = getattr(getattr(_unwrapped(function), "__code__", None), "co_filename", None)
    users = [frame for frame in frames if frame.filename == here or _is_users(frame.filename)]
    return f"{_shown(users[-1].filename)}:{users[-1].lineno}, in {users[-1].name}" if users else None


def _is_users(filename: str) -> bool:
    return not filename.startswith("<") and not os.path.realpath(filename).startswith((_OWN, *_LIBRARIES))


def _definition(function: object) -> str | None:
    """Return file and line of the definition of a function, or of an object's class."""
    found = _unwrapped(function)
    if function is None or is_own(function):
        return None
    try:
        filename, line = inspect.getsourcefile(found), inspect.getsourcelines(found)[1]
    except (OSError, TypeError):
        return None
    return f"{_shown(filename)}:{line}" if filename else None


def _unwrapped(function: Any) -> Any:
    """Return the function of partials, methods and what stands for one, and the class of other objects."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    return function if hasattr(function, "__qualname__") else type(function)


def _shown(filename: str) -> str:
    """Return a path as short as it can be found from here."""
    path, here = os.path.realpath(filename), os.path.realpath(os.curdir)
    return os.path.relpath(path, here) if path.startswith(f"{here}{os.sep}") else path

"""User functions by import path, checked against their protocol before anything starts."""

from __future__ import annotations

import inspect
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from rollfeed.base.importing import import_object, is_async
from rollfeed.errors import PluginError
from rollfeed.faults import describe

T = TypeVar("T")


@overload
def load_plugin(given: None, protocol: type[T], *, key: str, folders: Sequence[Path] = ()) -> None: ...
@overload
def load_plugin(given: str | T, protocol: type[T], *, key: str, folders: Sequence[Path] = ()) -> T: ...
def load_plugin(given: str | T | None, protocol: type[T], *, key: str, folders: Sequence[Path] = ()) -> T | None:
    """Return a function, imported if it is named by its path, that can be called as ``protocol`` will call it.

    Args:
        given: A function, or its import path; a dotted name after the colon reaches into classes. None stays None.
        protocol: A protocol with one ``__call__``.
        key: The setting that gives it, for errors.
        folders: Searched for the module or file besides the installed packages.

    Raises:
        PluginError: If it cannot be imported, is not callable, or does not take the protocol's arguments.
    """
    if given is None:
        return None
    function = _object_of(given, key=key, folders=folders)
    check_fits(function, protocol, key=_where(given, key))
    return function  # type: ignore[no-any-return]


def load_factory(
    given: str | Callable[..., T], protocol: type[T], *arguments: Any, key: str, folders: Sequence[Path] = ()
) -> T:
    """Call what is given, or what a path names, with ``arguments``, and check the methods of its result.

    Raises:
        PluginError: If it cannot be imported or called, or its result lacks a method of ``protocol``.
    """
    factory = _object_of(given, key=key, folders=folders)
    where = _where(given, key)
    if not callable(factory):
        raise PluginError(
            f"{where}: is a {type(factory).__name__}; it must be a function or class that makes a {protocol.__name__}"
        )
    try:
        inspect.signature(factory).bind(*arguments)
    except TypeError as error:
        given = ", ".join(type(argument).__name__ for argument in arguments) or "nothing"
        raise PluginError(f"{where}: {error}; it is called with {given}") from error
    except ValueError:
        pass  # built-ins without a signature show what they take only when they are called
    try:
        made = factory(*arguments)
    except (Exception, SystemExit, CancelledError) as error:
        raise PluginError(f"{where}: calling it failed: {describe(error, factory)}") from error
    check_methods(made, protocol, key=where)
    return made  # type: ignore[no-any-return]


def _object_of(given: Any, *, key: str, folders: Sequence[Path]) -> Any:
    return import_object(given, key=key, folders=folders) if isinstance(given, str) else given


def _where(given: Any, key: str) -> str:
    return f"{key} = {given!r}" if isinstance(given, str) else key


def check_fits(function: Any, protocol: type[Any], *, key: str) -> None:
    """Check that ``function`` can be called with the arguments of ``protocol.__call__``.

    Raises:
        PluginError: If it is not callable, lacks a parameter or requires another one, or is not async where it must be.
    """
    if not callable(function):
        raise PluginError(f"{key}: is a {type(function).__name__}, not callable; it must fit {protocol.__name__}")
    _check_call(function, protocol.__call__, protocol, key=key, what="it")


def check_methods(made: Any, protocol: type[Any], *, key: str) -> None:
    """Check that an object has every public method of ``protocol``, with parameters that fit.

    Raises:
        PluginError: If one is missing or takes other arguments.
    """
    for name, method in inspect.getmembers(protocol, inspect.isfunction):
        if name.startswith("_"):
            continue
        given = getattr(made, name, None)
        if not callable(given):
            raise PluginError(f"{key}: does not fit {protocol.__name__}: {type(made).__name__} has no method {name!r}")
        _check_call(given, method, protocol, key=key, what=name)


def _check_call(
    given: Callable[..., Any], expected: Callable[..., Any], protocol: type[Any], *, key: str, what: str
) -> None:
    parameters = list(inspect.signature(expected).parameters.values())[1:]
    positional = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    keywords = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    try:
        inspect.signature(given).bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        call = ", ".join([*positional, *(f"{name}=..." for name in keywords)])
        raise PluginError(
            f"{key}: does not fit {protocol.__name__}: {error}; {what} is called with ({call})"
        ) from error
    except ValueError:
        return  # built-ins without a signature show what they take only when they are called
    if inspect.iscoroutinefunction(expected) and not is_async(given):
        raise PluginError(f"{key}: does not fit {protocol.__name__}: {what} must be async")

"""Users' functions: found by their import paths, and whether they are async."""

from __future__ import annotations

import importlib
import inspect
import sys
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from hashlib import blake2b
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from rollfeed.errors import PluginError
from rollfeed.faults import describe


def import_object(path: str, *, key: str, folders: Sequence[Path] = ()) -> Any:
    """Return what ``module:name`` or ``file.py:name`` names; a dotted name reaches into classes.

    ``folders`` are searched for modules before the installed packages, and for files before the current folder; ``key``
    is the setting, for errors.

    Raises:
        PluginError: If there is no such module, file or name, or importing it fails.
    """
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        example = "module:name or file.py:name, for example rewards:score"
        raise PluginError(f"{key} = {path!r}: write it as {example}")
    try:
        found: Any = _import(place, folders)
    except PluginError as error:
        raise PluginError(f"{key} = {path!r}: {error}") from error.__cause__
    for part in name.split("."):
        if not hasattr(found, part):
            known = sorted(n for n in vars(found) if not n.startswith("_")) if hasattr(found, "__dict__") else []
            raise PluginError(f"{key} = {path!r}: {place} has no {name!r}; it has {', '.join(known) or 'nothing'}")
        found = getattr(found, part)
    return found


def import_in_worker(path: str, *, key: str, folders: Sequence[str]) -> Any:
    """Return what :func:`import_object` does, in a worker, where what it imports when it is called is found, too."""
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    return import_object(path, key=key, folders=[Path(folder) for folder in folders])


def find_function(path: str) -> Callable[..., Any]:
    """Return the function that ``package.module.function`` or ``module:name`` names.

    Raises:
        ImportError: If there is no such module, or it is ``__main__``, which other processes have another of.
        AttributeError: If the module has nothing of that name.
        TypeError: If it is not a function.
    """
    module, _, names = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or module == "__main__":
        raise ImportError(f"{path!r}: name a function of an importable module, as package.module.function")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    if not callable(found):
        raise TypeError(f"{path!r} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def is_async(function: Any) -> bool:
    """Whether calling a function, a partial of one or an object returns a coroutine."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _import(place: str, folders: Sequence[Path]) -> ModuleType:
    file = _find_file(place, folders) if place.endswith(".py") else None
    added = [str(folder) for folder in ([file.parent] if file else folders) if str(folder) not in sys.path]
    sys.path[:0] = added
    try:
        source = file or _shadowed(place, folders)
        return importlib.import_module(place) if source is None else _import_file(source)
    except ModuleNotFoundError as error:
        if file is None and error.name is not None and f"{place}.".startswith(f"{error.name}."):
            where = ", ".join(str(folder) for folder in folders) or "the installed packages"
            raise PluginError(f"no module {place!r} in {where}, nor installed") from None
        raise PluginError(f"importing it failed: {error}") from error
    except (Exception, SystemExit, CancelledError) as error:
        raise PluginError(f"importing it failed: {describe(error)}") from error
    finally:
        sys.path[:] = [entry for entry in sys.path if entry not in added]


def _shadowed(place: str, folders: Sequence[Path]) -> Path | None:
    """Return the file in the folders that a module means, where one of its name was imported from elsewhere."""
    imported = sys.modules.get(place)
    if imported is None or place in sys.stdlib_module_names or not getattr(imported, "__file__", None):
        return None
    files = [file.resolve() for folder in folders if (file := folder / f"{place}.py").is_file()]
    return files[0] if files and Path(imported.__file__ or "").resolve() != files[0] else None


def _find_file(place: str, folders: Sequence[Path]) -> Path:
    found = [file for folder in (*folders, Path()) if (file := folder / place).is_file()]
    if not found:
        where = ", ".join(str(folder) for folder in folders) or "the current folder"
        raise PluginError(f"no file {place!r} in {where}")
    return found[0].resolve()


def _import_file(file: Path) -> ModuleType:
    """Import a file under its stem, or under a name of its own where another module has that."""
    name = file.stem
    if name.isidentifier():
        known = find_spec(name) if name != "__main__" else None
        if known is not None and known.origin and Path(known.origin).resolve() == file:
            return importlib.import_module(name)
    name = f"{name}_{blake2b(str(file).encode(), digest_size=6).hexdigest()}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, file)
        assert spec is not None, file
        assert spec.loader is not None, file
        sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]

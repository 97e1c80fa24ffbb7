"""Environments by id: the built-in ones, and those that installed packages bring."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple

from rollfeed.base.importing import import_object
from rollfeed.environments.adapters import AdapterEntry, adapted_entries, adapted_entry, not_installed
from rollfeed.environments.builtin import BUILTIN_ENVIRONMENTS
from rollfeed.errors import ConfigError, PluginError, in_one_line, suggestion
from rollfeed.protocols import Environment

ENTRY_POINT_GROUP = "rollfeed.environments"
"""Entry points of this group: the name is the environment's id, the object an environment or a factory of one."""

_ID = re.compile(r"[a-z0-9_-]+/[A-Za-z0-9_-]+")
_ATTRIBUTES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "environment_id": (lambda value: isinstance(value, str), "a text"),
    "version": (lambda value: isinstance(value, int), "a whole number"),
    "summary": (lambda value: isinstance(value, str), "a text"),
    "max_level": (
        lambda value: value is None or isinstance(value, int),
        "a whole number or None",
    ),
    "make": (callable, "a method"),
    "verify": (callable, "a method"),
}
"""What an environment must have: whether a value is of the right kind, and that in words."""


class PathEntry(NamedTuple):
    """An environment that settings name by an import path, in the form of an entry point."""

    name: str
    value: str
    """``module:name`` or ``file.py:name``."""
    folders: tuple[str, ...]

    def load(self) -> Any:
        """Return what the path names. Raises PluginError if there is nothing."""
        return import_object(self.value, key="environment", folders=[Path(folder) for folder in self.folders])


BY_PATH = "by-path-"
"""Begins names of environments in workers that are found by their paths."""
named_by_path: dict[str, PathEntry] = {}
"""Environments that were named by their paths in this process, by id, for whoever verifies their problems later."""


def name_in_workers(environment_id: str) -> str:
    """Return what workers find an environment by: a name without the dots that would reach into a module."""
    entry = named_by_path.get(environment_id)
    return environment_id if entry is None else f"{BY_PATH}{json.dumps(entry).encode().hex()}"


def installed_entry_points() -> Iterable[EntryPoint | AdapterEntry]:
    """Return the entry points of the packages installed here, and what adapters have; nothing is imported."""
    return (*entry_points(group=ENTRY_POINT_GROUP), *adapted_entries())


class EnvironmentRegistry:
    """Finds environments by namespaced id; those of other packages are imported when first asked for.

    Args:
        environments: The registry's own: trusted to verify any response in well under 5 ms without side effects, so
            that they need no worker.
        find_entry_points: Returns where environments of other packages are.
        folders: Searched for environments that are named by import paths.

    Raises:
        ConfigError: If an id is taken, or is not of the form ``namespace/name``.
        PluginError: If an environment lacks something it must have.
    """

    def __init__(
        self,
        environments: Iterable[Environment] = BUILTIN_ENVIRONMENTS,
        *,
        find_entry_points: Callable[[], Iterable[EntryPoint | AdapterEntry]] = installed_entry_points,
        folders: Iterable[Path] = (),
    ) -> None:
        self._environments: dict[str, Environment] = {}
        self._find_entry_points = find_entry_points
        self._folders = tuple(str(folder.resolve()) for folder in folders)
        self._entry_points: dict[str, EntryPoint | AdapterEntry] | None = None
        for environment in environments:
            if problem := _misfit(environment):
                raise PluginError(f"{environment!r:.80} does not fit Environment: {problem}")
            self._add(environment)
        self._own = frozenset(self._environments)

    def __contains__(self, environment_id: str) -> bool:
        return environment_id in self._environments or self._entry(environment_id) is not None

    def is_own(self, environment_id: str) -> bool:
        """Whether an environment is one of those that the registry was made with."""
        return environment_id in self._own

    def steps_path(self, environment_id: str) -> str | None:
        entry = self._entry(environment_id)
        if self.is_own(environment_id) or entry is None or (isinstance(entry, AdapterEntry) and entry.is_served):
            return None
        return f"rollfeed.environments.episodes_in_workers:{name_in_workers(environment_id)}"

    def ids(self) -> tuple[str, ...]:
        """Return all ids, sorted; nothing is imported."""
        return tuple(sorted({*self._environments, *self._available(), *named_by_path}))

    def get(self, environment_id: str) -> Environment:
        """Return an environment.

        Args:
            environment_id: Its id, or the import path of an environment, its class or a function that makes it.

        Raises:
            ConfigError: If there is none of that id; the message has the nearest one.
            PluginError: If it comes from a package and cannot be loaded; the message names the entry point.
        """
        if ":" in environment_id:
            entry = PathEntry("", environment_id, self._folders)
            entry = entry._replace(name=str(getattr(_made(entry.load()), "environment_id", "")))
            if entry.name in self._own:
                raise ConfigError(f"environment {environment_id!r}: its id {entry.name!r} is taken: give it another")
            named_by_path[entry.name] = entry
            environment_id = entry.name
        if environment_id not in self._environments and (found := self._entry(environment_id)) is not None:
            self._load(found)
        if environment_id not in self._environments:
            raise ConfigError(f"environment {environment_id!r}: there is none; {self._suggestion(environment_id)}")
        return self._environments[environment_id]

    def _add(self, environment: Environment) -> None:
        name = environment.environment_id
        if not _ID.fullmatch(name):
            raise ConfigError(f"environment id {name!r}: write it as namespace/name, for example my/puzzle")
        if name in self._environments:
            raise ConfigError(f"environment {name!r} is registered already: give one of the two another id")
        self._environments[name] = environment

    def adapted(self) -> dict[str, str]:
        """Return the ids of packages that are adapted, and a line about each; nothing is imported."""
        return {name: entry.summary for name, entry in self._available().items() if isinstance(entry, AdapterEntry)}

    def _available(self) -> dict[str, EntryPoint | AdapterEntry]:
        if self._entry_points is None:
            self._entry_points = {point.name: point for point in self._find_entry_points()}
        return self._entry_points

    def _entry(self, environment_id: str) -> EntryPoint | PathEntry | AdapterEntry | None:
        by_name = self._available().get(environment_id)
        return named_by_path.get(environment_id) or by_name or adapted_entry(environment_id)

    def _load(self, point: EntryPoint | PathEntry | AdapterEntry) -> None:
        where = f"environment {point.name!r} (entry point {point.value!r})"
        try:
            environment = _made(point.load())
            found = getattr(environment, "environment_id", None)
            problem = _misfit(environment)
        except (Exception, SystemExit) as error:  # another package's: whatever it raises is reported under its name
            raise PluginError(f"{where}: cannot be loaded: {in_one_line(error)}") from error
        if found != point.name:
            raise PluginError(f"{where}: its environment_id is {found!r}; it must be the entry point's name")
        if problem:
            raise PluginError(f"{where}: does not fit Environment: {problem}")
        self._add(environment)

    def _suggestion(self, environment_id: str) -> str:
        if lacking := not_installed(environment_id):
            return lacking
        ids = self.ids()
        by_name = [known for known in ids if known.partition("/")[2] == environment_id]
        sizes = Counter(known.partition("/")[0] for known in ids)
        counts = ", ".join(f"{name}/* ({size})" for name, size in sorted(sizes.items()))
        return suggestion(environment_id, by_name or ids, otherwise=f"known here: {counts}; see rollfeed env list")


def _made(loaded: Any) -> Any:
    """Return an environment from itself, its class or a function that makes it."""
    return loaded() if callable(loaded) else loaded


def _misfit(environment: Any) -> str | None:
    """Return what keeps an object from being an environment, or None."""
    if lacking := [name for name in _ATTRIBUTES if not hasattr(environment, name)]:
        return f"it lacks {', '.join(lacking)}"
    for name, (fits, wanted) in _ATTRIBUTES.items():
        if not fits(value := getattr(environment, name)):
            return f"its {name} is {value!r:.80}; that must be {wanted}"
    return None

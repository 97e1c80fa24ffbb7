"""The namespaces of adapters, and the names in them, without an import of what they adapt.

The names that a package registers are read from its source: importing all of RLVE-Gym takes seconds, and all of
reasoning-gym longer.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple


class Namespace(NamedTuple):
    """A namespace of environments."""

    environment: str
    """Its class, which takes a name, and the module of this package that it is in and that imports what it adapts."""
    summary: str
    """Of an environment, after its name."""
    extra: str | None = None
    """Installs what is adapted, where that is a package."""
    package: str = ""
    """What is imported of it."""
    sources: str = ""
    """Files of the package that register names; none where names are not known before they are asked for."""
    pattern: str = ""
    """A name in these files."""
    without: tuple[str, ...] = ()
    """Names that are no environments."""
    is_served: bool = False
    """Whether episodes go on in a server, and the module is its client."""


ADAPTERS = {
    "nemo": Namespace("nemo_gym:NemoGymEnvironment", "a resources server of NeMo-Gym"),
    "openenv": Namespace("open_env:OpenEnvEnvironment", "a server of OpenEnv", is_served=True),
    "vf": Namespace("verifiers_tasks:VerifiersEnvironment", "a taskset of verifiers", "verifiers", "verifiers"),
    "rg": Namespace(
        "reasoning_gym:ReasoningGymEnvironment",
        "of reasoning-gym",
        "reasoning-gym",
        "reasoning_gym",
        "**/*.py",
        r"^(?:DATASET_NAME *= *|register_dataset\( *)[\"'](\w+)[\"']",
        without=("composite",),
    ),
    "rlve": Namespace(
        "rlve_gym:RlveEnvironment",
        "of RLVE-Gym",
        "rlve",
        "Gym",
        "environments/__init__.py",
        r"[\"'](\w+)[\"'] *: *\w+",
    ),
}
"""By namespace."""


class AdapterEntry(NamedTuple):
    """An environment of an adapter, in the form of an entry point."""

    name: str
    """Its id."""

    @property
    def value(self) -> str:
        """The import path of what returns it."""
        return f"{__package__}.{ADAPTERS[self.name.partition('/')[0]].environment}"

    @property
    def summary(self) -> str:
        """A line on it, known without an import."""
        namespace, _, name = self.name.partition("/")
        return f"{name}, {ADAPTERS[namespace].summary}"

    @property
    def is_served(self) -> bool:
        """Whether its episodes go on in a server, so that it is a :class:`~rollfeed.protocols.ServedEnvironment`."""
        return ADAPTERS[self.name.partition("/")[0]].is_served

    def load(self) -> Any:
        """Return the environment; what it adapts is imported."""
        module, _, function = self.value.partition(":")
        return getattr(importlib.import_module(module), function)(self.name.partition("/")[2])


def adapted_entries() -> Iterator[AdapterEntry]:
    """Return the environments whose names are known, of packages that are installed."""
    return (AdapterEntry(f"{namespace}/{name}") for namespace in ADAPTERS for name in known_names(namespace))


def adapted_entry(environment_id: str) -> AdapterEntry | None:
    """Return the entry of an id in a namespace that takes any name, else None."""
    namespace, _, name = environment_id.partition("/")
    adapter = ADAPTERS.get(namespace)
    takes_any = adapter is not None and not adapter.sources and bool(name)
    return AdapterEntry(environment_id) if takes_any and not not_installed(environment_id) else None


def not_installed(environment_id: str) -> str | None:
    """Return what to tell of an id whose package is not installed here, else None."""
    adapter = ADAPTERS.get(environment_id.partition("/")[0])
    if adapter is None or not adapter.package or importlib.util.find_spec(adapter.package) is not None:
        return None
    return f"{adapter.package} is not installed here: pip install 'rollfeed[{adapter.extra}]'"


@cache
def known_names(namespace: str) -> frozenset[str]:
    """Return the names of a namespace that are known here: none where its package is not installed, or takes any."""
    adapter = ADAPTERS[namespace]
    found = importlib.util.find_spec(adapter.package) if adapter.sources else None
    folders = [] if found is None else list(found.submodule_search_locations or [])
    pattern = re.compile(adapter.pattern, re.MULTILINE)
    files = [path for folder in folders for path in Path(folder).glob(adapter.sources)]
    names = (name for path in files for name in pattern.findall(path.read_text(encoding="utf-8")))
    return frozenset(names) - {*adapter.without}


def version_number(distribution: str) -> int:
    """Return the version of an installed package as a number that differs from other versions'."""
    return int("".join(f"{int(part):03d}" for part in re.findall(r"\d+", version(distribution))))

"""Whether nodes have what a run needs: this rollfeed and Python, modules, the model's folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rollfeed import __version__

PROTOCOL = 1
"""Raised when drivers and workers of one version of rollfeed no longer understand each other."""


class NodeNeeds(NamedTuple):
    """The things that a node must have, in plain values."""

    rollfeed: str
    protocol: int
    python: tuple[int, int]
    modules: tuple[str, ...]
    folders: tuple[str, ...]


def wanted_of_nodes(*, modules: Sequence[str] = (), folders: Sequence[str] = ()) -> NodeNeeds:
    """Return what nodes must have besides this rollfeed and Python."""
    return NodeNeeds(__version__, PROTOCOL, sys.version_info[:2], tuple(modules), tuple(folders))


def node_probe() -> Callable[..., str | None]:
    """Return a function that says what a node lacks, None if nothing.

    It is made here so that Ray sends all of it: a node may have no rollfeed, or another one.
    """

    def probe(
        rollfeed: str, protocol: int, python: tuple[int, int], modules: list[str], folders: list[str]
    ) -> str | None:
        import importlib.util
        import os
        import sys

        if sys.version_info[:2] != tuple(python):
            return f"has Python {sys.version_info[0]}.{sys.version_info[1]}, this is {python[0]}.{python[1]}"
        try:
            from rollfeed import __version__ as found
            from rollfeed.cluster.node_checks import PROTOCOL
        except ImportError as error:
            return f"cannot import rollfeed[ray] {rollfeed}: {error}"
        if (found, PROTOCOL) != (rollfeed, protocol):
            return f"has rollfeed {found} (protocol {PROTOCOL}), this is {rollfeed} (protocol {protocol})"
        for module in modules:
            if importlib.util.find_spec(module) is None:
                return f"lacks the Python module {module}: install the same extras as here"
        for folder in folders:
            if not os.path.isdir(folder):
                return f"has no folder {folder}: put the model there, or on a file system that all nodes share"
        return None

    return probe

"""Problems made inside a worker, by environment.

``rollfeed.environments.making.in_workers:<name>`` is a function path as in :mod:`rollfeed.environments.verifying`, so
that importing an environment's package does not count against the deadline of a problem.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from rollfeed.environments.making.maker import EnvironmentFacts, TaskFailedError, make_or_fail
from rollfeed.environments.registry import EnvironmentRegistry, name_in_workers, named_by_path
from rollfeed.environments.tasks import with_parameters
from rollfeed.environments.verifying import environment_in_worker
from rollfeed.protocols import Environment

DESCRIBE = f"{__name__}.describe"


def maker_path(environment_id: str) -> str:
    """Return the function path of what makes an environment's problems, :func:`make_problems` but for the first."""
    return f"{__name__}:{name_in_workers(environment_id)}"


def __getattr__(name: str) -> Callable[..., list[dict[str, Any]]]:
    environment = environment_in_worker(name)

    @cache
    def changed(parameters: str) -> Environment:
        return with_parameters(environment, json.loads(parameters))

    return partial(make_problems, changed)


def make_problems(
    environment: Callable[[str], Environment],
    parameters: str,
    asked: Mapping[str, Any],
    indices: Sequence[int],
    seconds: float,
) -> list[dict[str, Any]]:
    """Return problems in the order of their indices, at least one, and none that is begun after a time.

    Each is ``task`` with its fields, or ``kind`` and ``cause`` of a failure; ``asked`` has the arguments of
    :func:`rollfeed.environments.tasks.make_task` but for the index, and ``parameters`` are JSON.
    """
    ends_at, made = time.monotonic() + seconds, list[dict[str, Any]]()
    for index in indices:
        try:
            task = make_or_fail(environment(parameters), index=index, **asked)
            made.append({"task": msgspec.to_builtins(task)})
        except TaskFailedError as error:
            made.append({"kind": error.kind, "cause": error.cause})
        if time.monotonic() >= ends_at:
            break
    return made


def describe(chosen: Sequence[tuple[str, Mapping[str, Any]]], folders: Sequence[str]) -> list[dict[str, Any]]:
    """Return the ``facts`` of environments by id or path, and the ``entry`` of those that are named by a path."""
    registry = EnvironmentRegistry(folders=map(Path, folders))
    found = []
    for environment_id, parameters in chosen:
        environment = with_parameters(registry.get(environment_id), parameters)
        facts = EnvironmentFacts.of(environment)
        found.append({"facts": asdict(facts), "entry": named_by_path.get(facts.environment_id)})
    return found

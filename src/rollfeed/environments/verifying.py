"""Responses handed to the verifiers of environments: in this process, and by id in workers.

``rollfeed.environments.verifying:<environment id>`` is a function path. Workers give finding a function time of its
own, so that importing an environment's package does not count against the deadline of a grading.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from random import Random
from typing import Any

from rollfeed.environments.registry import BY_PATH, EnvironmentRegistry, PathEntry, name_in_workers, named_by_path
from rollfeed.environments.tasks import check_level, stored
from rollfeed.errors import RewardError
from rollfeed.faults import describe
from rollfeed.protocols import Environment
from rollfeed.types import Verdict

installed_registry = cache(EnvironmentRegistry)
"""Return the environments that are installed here, the same at every call."""


def verifier_path(environment_id: str) -> str:
    """Return the function path of an environment's verifier: ``(problem, response) -> Verdict``."""
    return f"{__name__}:{name_in_workers(environment_id)}"


def environment_in_worker(name: str) -> Environment:
    """Return the environment of a :func:`rollfeed.environments.registry.name_in_workers`.

    Raises:
        AttributeError: If the name is none, as those that Python itself asks modules for.
        ConfigError: If there is no such environment; or PluginError.
    """
    if name.startswith(BY_PATH):
        environment_id, value, folders = json.loads(bytes.fromhex(name.removeprefix(BY_PATH)))
        named_by_path[environment_id] = PathEntry(environment_id, value, tuple(folders))
        name = environment_id
    if "/" not in name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return installed_registry().get(name)


def __getattr__(name: str) -> Callable[[Mapping[str, Any], str], Verdict]:
    return partial(verify_problem, environment_in_worker(name))


def verify_problem(environment: Environment, problem: Mapping[str, Any], response: str) -> Verdict:
    """Return the verdict of an environment.

    A problem is JSON values: ``version``, and either ``params`` or the ``level`` and ``seed`` to make them again from.

    Raises:
        RewardError: If the problem is of another version, or the verifier raises or returns no verdict.
    """
    name = environment.environment_id
    if problem["version"] not in (None, environment.version):
        raise RewardError(
            f"environment {name}: the prompt is of version {problem['version']}, installed is {environment.version}"
        )
    doing = "make"
    try:
        params = problem.get("params")
        if params is None:
            check_level(environment, problem["level"])
            params = stored(environment.make(problem["level"], Random(problem["seed"]))[1])
        doing = "verify"
        verdict = environment.verify(params, response)
    except Exception as error:  # of another package perhaps: its fault is an ERROR, never a wrong answer
        raise RewardError(f"environment {name}: {doing} raised {describe(error)}") from error
    if not isinstance(verdict, Verdict):
        raise RewardError(f"environment {name}: verify returned {verdict!r:.80}; it must return a Verdict")
    return verdict

"""Episodes of environments that are not built in, whose methods are called in workers.

``rollfeed.environments.episodes_in_workers:<name>`` is a function path as in :mod:`rollfeed.environments.verifying`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rollfeed.environments.verifying import environment_in_worker
from rollfeed.errors import PluginError, RewardError
from rollfeed.faults import describe
from rollfeed.protocols import Environment, EnvironmentStep, MultiTurnEnvironment
from rollfeed.types import Verdict


def __getattr__(name: str) -> Callable[..., Any]:
    return partial(call_method, environment_in_worker(name))


_GIVES = {"start": Mapping, "step": EnvironmentStep, "give_up": Verdict}


def call_method(environment: Environment, method: str, *arguments: Any) -> Any:
    """Return what ``start``, ``step`` or ``give_up`` of an environment returns.

    Raises:
        PluginError: If it has no such methods.
        RewardError: If the method raises, or returns something else than it must.
    """
    if not isinstance(environment, MultiTurnEnvironment):
        raise PluginError(f"environment {environment.environment_id}: it has no start, step and give_up")
    where = f"environment {environment.environment_id}: {method}"
    try:
        given = getattr(environment, method)(*arguments)
    except Exception as error:
        raise RewardError(f"{where} raised {describe(error)}") from error
    if not isinstance(given, _GIVES[method]):
        raise RewardError(f"{where} returned {given!r:.80}; that must be of {_GIVES[method].__name__}")
    return given

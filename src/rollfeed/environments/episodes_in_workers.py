"""Episodes of environments that are not built in, whose methods are called in workers.

``rollfeed.environments.episodes_in_workers:<name>`` is a function path as in :mod:`rollfeed.environments.verifying`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rollfeed.environments.verifying import environment_in_worker
from rollfeed.errors import PluginError
from rollfeed.protocols import Environment, MultiTurnEnvironment


def __getattr__(name: str) -> Callable[..., Any]:
    return partial(call_method, environment_in_worker(name))


def call_method(environment: Environment, method: str, *arguments: Any) -> Any:
    """Return what ``start``, ``step`` or ``give_up`` of an environment returns.

    Raises:
        PluginError: If it has no such methods.
    """
    if not isinstance(environment, MultiTurnEnvironment):
        raise PluginError(f"environment {environment.environment_id}: it has no start, step and give_up")
    return getattr(environment, method)(*arguments)

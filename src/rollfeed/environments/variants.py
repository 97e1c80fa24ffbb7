"""Environments that come in variants: by parameters of a settings file, and with problems held out of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from rollfeed.errors import ConfigError
from rollfeed.protocols import Environment


@runtime_checkable
class HasParameters(Protocol):
    """What an environment with parameters has besides. *Extension point*, optional."""

    def with_parameters(self, parameters: Mapping[str, Any]) -> Environment:
        """Return the environment with some of its parameters changed.

        Raises:
            ConfigError: If there is no such parameter, or a value is out of its bounds.
        """


@runtime_checkable
class HasSplits(Protocol):
    """What an environment has besides that says itself which problems are held out. *Extension point*, optional.

    Without it :mod:`rollfeed.environments.held_out` does, by what a problem asks: for environments in which differently
    asked problems are the same.
    """

    def for_split(self, split: str) -> Environment:
        """Return the environment that makes the problems of a split; those of ``train`` are in no other."""


def with_parameters(environment: Environment, parameters: Mapping[str, Any]) -> Environment:
    """Return the environment with these parameters; itself where there are none.

    Raises:
        ConfigError: If it has no parameters, or not these.
    """
    if not parameters:
        return environment
    if not isinstance(environment, HasParameters):
        raise ConfigError(
            f"environment {environment.environment_id}: has no parameters, so {', '.join(sorted(parameters))} cannot "
            "be set: remove parameters"
        )
    return environment.with_parameters(parameters)


def for_split(environment: Environment, split: str) -> Environment:
    """Return the environment that makes the problems of a split; itself where it has no splits of its own."""
    return environment.for_split(split) if isinstance(environment, HasSplits) else environment

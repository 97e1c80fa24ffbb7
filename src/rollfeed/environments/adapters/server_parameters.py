"""Parameters of environments that are servers or modules of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollfeed.errors import ConfigError, suggestion


def chosen(environment_id: str, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults with what was given.

    Raises:
        ConfigError: If there is no such parameter, or a value is of another kind.
    """
    for name, value in given.items():
        if name not in defaults:
            raise ConfigError(f"environment {environment_id}: no parameter {name!r}; {suggestion(name, defaults)}")
        kind = type(defaults[name])
        if not isinstance(value, kind) and not (kind is float and type(value) is int):
            raise ConfigError(f"environment {environment_id}: {name} = {value!r}: must be of {kind.__name__}")
    return {**defaults, **given}


def server_url(environment_id: str, parameters: Mapping[str, Any]) -> str:
    """Return the parameter ``url`` without a slash at its end. Raises ConfigError if it is none."""
    url: str = parameters["url"]
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"environment {environment_id}: parameters.url = {url!r}: must be http:// or https://")
    return url.rstrip("/")

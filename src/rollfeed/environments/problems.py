"""Why rows that name an environment cannot be verified: known beforehand, without a response.

Environments of other packages are not imported for this: what their verifiers make of the parameters is not known.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rollfeed.environments.registry import EnvironmentRegistry
from rollfeed.environments.verifying import verify_problem
from rollfeed.errors import ConfigError, RewardError, suggestion

NO_ENVIRONMENT = "the prompt's metadata has no environment and params to verify with"
NO_PARAMETER = (
    "the prompt's metadata has no config with the problem: rm_type rlve reads config.parameter, "
    "or config.seed with problem_difficulty for environments of rollfeed"
)
GYM_NAMESPACE = "rlve/"
_ANY_RESPONSE = "?"
_GYM_ENTRY = re.compile(r"""^ +["'](\w+)["'] *: *\w+""", re.MULTILINE)


def environment_problem(registry: EnvironmentRegistry, metadata: Mapping[str, Any]) -> str | None:
    """Return why the grader ``environment`` can verify nothing with this metadata, or None."""
    name, params = metadata.get("environment"), metadata.get("params")
    if not isinstance(name, str) or not isinstance(params, Mapping):
        return NO_ENVIRONMENT
    return _verifying_problem(registry, name, {"version": metadata.get("version"), "params": params})


def rlve_problem(registry: EnvironmentRegistry, metadata: Mapping[str, Any]) -> str | None:
    """Return why the grader ``rlve`` can verify nothing with this metadata, or None."""
    name = metadata.get("environment")
    if not isinstance(name, str) or not name:
        return f"the prompt's metadata has environment = {name!r:.80}; rm_type rlve needs an environment's id"
    gym_name, problem = name.removeprefix(GYM_NAMESPACE), problem_of(metadata)
    if name in registry:
        return NO_PARAMETER if problem is None else _verifying_problem(registry, name, problem)
    if "/" in gym_name:  # of neither kind; the registry says what is near
        return _verifying_problem(registry, name, {})
    if not has_gym():
        return no_gym(name)
    names = _gym_names()
    if names and gym_name not in names:
        nearest = suggestion(gym_name, names, otherwise="it has others, such as Sorting")
        return f"environment {name!r:.80}: RLVE-Gym has none of that name; {nearest}"
    return None if has_gym_parameter(metadata) else NO_PARAMETER


def problem_of(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the problem of a registered environment, or None where the metadata does not say which."""
    version, config = metadata.get("version"), metadata.get("config")
    given = metadata.get("params")
    if given is None and isinstance(config, Mapping):
        given = config.get("parameter")
    if isinstance(given, Mapping):
        return {"version": version, "params": dict(given)}
    level = metadata.get("problem_difficulty")
    seed = config.get("seed") if isinstance(config, Mapping) else None
    if given is None and _is_integer(level) and _is_integer(seed):
        return {"version": version, "level": level, "seed": seed}
    return None


def has_gym_parameter(metadata: Mapping[str, Any]) -> bool:
    """Whether the metadata has the problem of an environment of RLVE-Gym."""
    config = metadata.get("config")
    return isinstance(config, Mapping) and isinstance(config.get("parameter"), Mapping)


def has_gym() -> bool:
    """Whether RLVE-Gym is installed."""
    return importlib.util.find_spec("Gym") is not None


def no_gym(name: str) -> str:
    """Return what to do about an environment that only RLVE-Gym could have."""
    return (
        f"environment {name!r:.80} is none of rollfeed's, and RLVE-Gym is not installed here: "
        "pip install 'rollfeed[rlve]', or correct the id; `rollfeed env list` shows rollfeed's"
    )


@cache
def _gym_names() -> frozenset[str]:
    """Return what RLVE-Gym calls its environments, read from its source: its import takes seconds."""
    found = importlib.util.find_spec("Gym")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    sources = [Path(folder, "environments", "__init__.py") for folder in folders]
    texts = [source.read_text(encoding="utf-8") for source in sources if source.is_file()]
    return frozenset(name for text in texts for name in _GYM_ENTRY.findall(text))


def _verifying_problem(registry: EnvironmentRegistry, name: str, problem: Mapping[str, Any]) -> str | None:
    try:
        if name in registry and not registry.is_own(name):
            return None
        verify_problem(registry.get(name), problem, _ANY_RESPONSE)
    except (ConfigError, RewardError) as error:
        return str(error)
    return None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

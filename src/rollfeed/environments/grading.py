"""The graders ``environment`` and ``rlve``: a response goes to the verifier of the environment that made the prompt.

Rows of ``rlve`` are as RLVE writes them, for environments of RLVE-Gym and of this package. Source: RLVE
(arXiv:2511.07317) and its package rlve-gym.

Why a row cannot be verified is known without a response. Environments of other packages are not imported for this: what
their verifiers make of the parameters is not known.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from rollfeed.environments.adapters import known_names
from rollfeed.environments.registry import EnvironmentRegistry
from rollfeed.environments.verifying import verifier_path, verify_problem
from rollfeed.errors import ConfigError, RewardError, suggestion
from rollfeed.protocols import Workers
from rollfeed.types import Correct, Verdict

RM_TYPE = "environment"
"""``rm_type`` of prompts that an environment made."""
RLVE_RM_TYPE = "rlve"
RLVE_KEYS = ("reward", "accuracy", "format_score")
"""What ``reward_key`` may choose."""

_NO_ENVIRONMENT = "the prompt's metadata has no environment and params to verify with"
_NO_PARAMETER = (
    "the prompt's metadata has no config with the problem: rm_type rlve reads config.parameter, "
    "or config.seed with problem_difficulty for environments of rollfeed"
)
_GYM_NAMESPACE = "rlve/"
_GYM_VERIFIER = "rollfeed.environments.adapters.rlve_gym.verify"
_ANY_RESPONSE = "?"


class _Call(NamedTuple):
    """A call of a verifier, but for the response."""

    environment_id: str
    problem: dict[str, Any]
    is_of_gym: bool = False


class EnvironmentGrader:
    """Reads ``environment``, ``version`` and ``params`` from a prompt's metadata, and has the response verified.

    The registry's own environments verify at once, in this process. Those of other packages, which may hang or
    crash, verify in workers; their packages are not even imported here.

    An unknown environment, another version of it, missing parameters or a verifier that raises is an ERROR verdict.

    Workers verify for environments of other packages.
    """

    def __init__(self, registry: EnvironmentRegistry, *, workers: Workers, deadline_seconds: float) -> None:
        self._registry = registry
        self._workers = workers
        self._deadline_seconds = deadline_seconds

    async def __call__(self, response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
        """Return the environment's verdict. Raises WorkerError if a worker gave none, by its deadline or at all."""
        return await self._verdict(_environment_call(metadata), response)

    async def _verdict(self, call: _Call | str, response: str) -> Verdict:
        if isinstance(call, str):
            return Verdict.failed(call)
        if call.is_of_gym or _verifies_elsewhere(self._registry, call.environment_id):
            path = _GYM_VERIFIER if call.is_of_gym else verifier_path(call.environment_id)
            result = await self._workers.call(
                path, [call.problem, response], deadline_seconds=self._deadline_seconds, cached=True
            )
            return msgspec.convert(result, type=Verdict)
        try:
            return verify_problem(self._registry.get(call.environment_id), call.problem, response)
        except (ConfigError, RewardError) as error:
            return Verdict.failed(str(error))


class RlveGrader(EnvironmentGrader):
    """Reads ``environment``, ``config`` and ``problem_difficulty`` from a prompt's metadata.

    ``environment`` is an id that is registered here, or the name of an environment of RLVE-Gym, whose verifiers run in
    workers. The reward is the environment's, in [-1, 1] for RLVE-Gym. Where a ``reward_key`` is in force it is
    published under ``reward``, beside ``accuracy`` and ``format_score``.

    An unknown environment, a missing or malformed config, a verifier that raises, or RLVE-Gym not being installed is
    an ERROR verdict; so is a scorer of RLVE-Gym that raises, which RLVE itself takes for a wrong answer.
    """

    async def __call__(self, response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
        """Return the environment's verdict. Raises WorkerError if a worker gave none, by its deadline or at all."""
        verdict = await self._verdict(_rlve_call(self._registry, metadata), response)
        if metadata.get("reward_key") is None or verdict.reward is None or isinstance(verdict.reward, dict):
            return verdict
        numbers = (verdict.reward, float(verdict.correct is Correct.YES), float(verdict.format_ok))
        return replace(verdict, reward=dict(zip(RLVE_KEYS, numbers, strict=True)))


def environment_problem(registry: EnvironmentRegistry, metadata: Mapping[str, Any]) -> str | None:
    """Return why the grader ``environment`` can verify nothing with this metadata, or None."""
    return _problem(registry, _environment_call(metadata))


def rlve_problem(registry: EnvironmentRegistry, metadata: Mapping[str, Any]) -> str | None:
    """Return why the grader ``rlve`` can verify nothing with this metadata, or None."""
    call = _rlve_call(registry, metadata)
    if isinstance(call, str) or not call.is_of_gym:
        return _problem(registry, call)
    name, names = call.problem["environment"], known_names("rlve")
    if not names or name in names:
        return None
    nearest = suggestion(name, names, otherwise="it has others, such as Sorting")
    return f"environment {call.environment_id!r:.80}: RLVE-Gym has none of that name; {nearest}"


def _problem(registry: EnvironmentRegistry, call: _Call | str) -> str | None:
    if isinstance(call, str):
        return call
    try:
        if not _verifies_elsewhere(registry, call.environment_id):
            verify_problem(registry.get(call.environment_id), call.problem, _ANY_RESPONSE)
    except (ConfigError, RewardError) as error:
        return str(error)
    return None


def _verifies_elsewhere(registry: EnvironmentRegistry, environment_id: str) -> bool:
    return environment_id in registry and not registry.is_own(environment_id)


def _environment_call(metadata: Mapping[str, Any]) -> _Call | str:
    """Return what is to be verified, or why nothing can be."""
    name, params = metadata.get("environment"), metadata.get("params")
    if not isinstance(name, str) or not isinstance(params, Mapping):
        return _NO_ENVIRONMENT
    return _Call(name, {"version": metadata.get("version"), "params": params})


def _rlve_call(registry: EnvironmentRegistry, metadata: Mapping[str, Any]) -> _Call | str:
    name, config = metadata.get("environment"), metadata.get("config")
    if not isinstance(name, str) or not name:
        return f"the prompt's metadata has environment = {name!r:.80}; rm_type rlve needs an environment's id"
    if name in registry and not name.startswith(_GYM_NAMESPACE):
        problem = _registered_problem(metadata)
        return _NO_PARAMETER if problem is None else _Call(name, problem)
    gym_name = name.removeprefix(_GYM_NAMESPACE)
    if "/" in gym_name:  # of neither kind; the registry says what is near
        return _Call(name, {})
    if importlib.util.find_spec("Gym") is None:
        return (
            f"environment {name!r:.80} is none of rollfeed's, and RLVE-Gym is not installed here: "
            "pip install 'rollfeed[rlve]', or correct the id; `rollfeed env list` shows rollfeed's"
        )
    if not isinstance(config, Mapping) or not isinstance(config.get("parameter"), Mapping):
        return _NO_PARAMETER
    return _Call(name, {"environment": gym_name, "config": dict(config)}, is_of_gym=True)


def _registered_problem(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the problem of a registered environment, or None where the metadata does not say which."""
    version, config, given = metadata.get("version"), metadata.get("config"), metadata.get("params")
    if given is None and isinstance(config, Mapping):
        given = config.get("parameter")
    if isinstance(given, Mapping):
        return {"version": version, "params": dict(given)}
    level, seed = metadata.get("problem_difficulty"), config.get("seed") if isinstance(config, Mapping) else None
    if given is None and type(level) is int and type(seed) is int:
        return {"version": version, "level": level, "seed": seed}
    return None

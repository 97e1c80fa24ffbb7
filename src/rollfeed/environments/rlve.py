"""The grader ``rlve``: rows as RLVE writes them, for environments of RLVE-Gym and of this package.

Source: RLVE (arXiv:2511.07317) and its package rlve-gym.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from rollfeed.environments.grading import EnvironmentGrader, call_verifier, failed
from rollfeed.environments.problems import GYM_NAMESPACE, NO_PARAMETER, has_gym, has_gym_parameter, no_gym, problem_of
from rollfeed.environments.registry import EnvironmentRegistry
from rollfeed.protocols import Workers
from rollfeed.types import Correct, Verdict

RLVE_RM_TYPE = "rlve"
RLVE_KEYS = ("reward", "accuracy", "format_score")
"""What ``reward_key`` may choose."""

_GYM_VERIFIER = "rollfeed.environments.rlve_gym.verify"


class RlveGrader:
    """Reads ``environment``, ``config`` and ``problem_difficulty`` from a prompt's metadata.

    ``environment`` is an id that is registered here, or the name of an environment of RLVE-Gym, whose verifiers run in
    workers. The reward is the environment's, in [-1, 1] for RLVE-Gym. Where a ``reward_key`` is in force it is
    published under ``reward``, beside ``accuracy`` and ``format_score``.

    An unknown environment, a missing or malformed config, a verifier that raises, or RLVE-Gym not being installed is
    an ERROR verdict; so is a scorer of RLVE-Gym that raises, which RLVE itself takes for a wrong answer.

    Args:
        registry: The environments of this package and of packages made for it.
        workers: Verify for all but the registry's own.
        deadline_seconds: Of each call of a worker, from its turn.
    """

    def __init__(self, registry: EnvironmentRegistry, *, workers: Workers, deadline_seconds: float) -> None:
        self._registry = registry
        self._workers = workers
        self._deadline_seconds = deadline_seconds
        self._registered = EnvironmentGrader(registry, workers=workers, deadline_seconds=deadline_seconds)

    async def __call__(self, response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
        """Return the environment's verdict.

        Raises:
            WorkerError: If a worker gave none, by its deadline or at all.
        """
        name = metadata.get("environment")
        if not isinstance(name, str) or not name:
            return failed(
                f"the prompt's metadata has environment = {name!r:.80}; rm_type rlve needs an environment's id"
            )
        verdict = await self._verdict(name, response, metadata)
        return verdict if metadata.get("reward_key") is None else _with_keys(verdict)

    async def _verdict(self, name: str, response: str, metadata: Mapping[str, Any]) -> Verdict:
        if name in self._registry:
            problem = problem_of(metadata)
            return failed(NO_PARAMETER) if problem is None else await self._registered.verify(name, problem, response)
        gym_name = name.removeprefix(GYM_NAMESPACE)
        if "/" in gym_name:  # of neither kind; the registry says what is near
            return await self._registered.verify(name, {}, response)
        if not self._has_gym:
            return failed(no_gym(name))
        if not has_gym_parameter(metadata):
            return failed(NO_PARAMETER)
        return await call_verifier(
            self._workers,
            _GYM_VERIFIER,
            {"environment": gym_name, "config": dict(metadata["config"])},
            response,
            deadline_seconds=self._deadline_seconds,
        )

    @cached_property
    def _has_gym(self) -> bool:
        return has_gym()


def _with_keys(verdict: Verdict) -> Verdict:
    if verdict.reward is None or isinstance(verdict.reward, dict):
        return verdict
    accuracy, format_score = float(verdict.correct is Correct.YES), float(verdict.format_ok)
    numbers = (verdict.reward, accuracy, format_score)
    return replace(verdict, reward=dict(zip(RLVE_KEYS, numbers, strict=True)))

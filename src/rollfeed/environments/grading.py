"""The grader ``environment``: hands a response to the verifier of the environment that made the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollfeed.environments.problems import NO_ENVIRONMENT
from rollfeed.environments.registry import EnvironmentRegistry
from rollfeed.environments.verifying import verifier_path, verify_problem
from rollfeed.errors import ConfigError, RewardError
from rollfeed.protocols import Workers
from rollfeed.types import Outcome, Verdict

RM_TYPE = "environment"
"""``rm_type`` of prompts that an environment made."""


class EnvironmentGrader:
    """Reads ``environment``, ``version`` and ``params`` from a prompt's metadata, and has the response verified.

    The registry's own environments verify at once, in this process. Those of other packages, which may hang or
    crash, verify in workers; their packages are not even imported here.

    An unknown environment, another version of it, missing parameters or a verifier that raises is an ERROR verdict.

    Args:
        registry: The environments.
        workers: Verify for environments of other packages.
        deadline_seconds: Of each call of a worker, from its turn.
    """

    def __init__(self, registry: EnvironmentRegistry, *, workers: Workers, deadline_seconds: float) -> None:
        self._registry = registry
        self._workers = workers
        self._deadline_seconds = deadline_seconds

    async def __call__(self, response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
        """Return the environment's verdict.

        Raises:
            WorkerError: If a worker gave none, by its deadline or at all.
        """
        name, params = metadata.get("environment"), metadata.get("params")
        if not isinstance(name, str) or not isinstance(params, Mapping):
            return failed(NO_ENVIRONMENT)
        return await self.verify(name, {"version": metadata.get("version"), "params": params}, response)

    async def verify(self, environment_id: str, problem: Mapping[str, Any], response: str) -> Verdict:
        """Return the verdict on a problem, as :func:`verify_problem` takes it.

        Raises:
            WorkerError: If a worker gave none, by its deadline or at all.
        """
        if environment_id in self._registry and not self._registry.is_own(environment_id):
            path = verifier_path(environment_id)
            return await call_verifier(self._workers, path, problem, response, deadline_seconds=self._deadline_seconds)
        try:
            return verify_problem(self._registry.get(environment_id), problem, response)
        except (ConfigError, RewardError) as error:
            return failed(str(error))


async def call_verifier(
    workers: Workers, function_path: str, problem: Mapping[str, Any], response: str, *, deadline_seconds: float
) -> Verdict:
    """Return the verdict of a verifier ``(problem, response) -> Verdict`` that runs in a worker.

    Raises:
        WorkerError: If it gave none, by its deadline or at all.
    """
    result = await workers.call(
        function_path, [dict(problem), response], deadline_seconds=deadline_seconds, cached=True
    )
    return msgspec.convert(result, type=Verdict)


def failed(detail: str) -> Verdict:
    """Return the ERROR verdict with its cause."""
    return Verdict(reward=None, outcome=Outcome.ERROR, detail=detail)

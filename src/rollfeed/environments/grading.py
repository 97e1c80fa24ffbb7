"""The grader ``environment``: hands a response to the verifier of the environment that made the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollfeed.environments.registry import EnvironmentRegistry
from rollfeed.errors import ConfigError
from rollfeed.protocols import Grader
from rollfeed.types import Outcome, Verdict

RM_TYPE = "environment"
"""``rm_type`` of prompts that an environment made."""


def environment_grader(registry: EnvironmentRegistry) -> Grader:
    """Return the grader; it reads ``environment``, ``version`` and ``params`` from a prompt's metadata.

    An unknown environment, another version of it, missing parameters or a verifier that raises is an
    ERROR verdict.
    """

    def grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
        name, params = metadata.get("environment"), metadata.get("params")
        if not isinstance(name, str) or not isinstance(params, Mapping):
            return _error("the prompt's metadata has no environment and params to verify with")
        try:
            environment = registry.get(name)
        except ConfigError as error:
            return _error(str(error))
        made_by = metadata.get("version", environment.version)
        if made_by != environment.version:
            return _error(f"environment {name}: the prompt is of version {made_by}, installed is {environment.version}")
        try:
            verdict = environment.verify(params, response)
        except Exception as error:  # a verifier of another package: its fault is an ERROR, never a wrong answer
            return _error(f"environment {name}: verify raised {type(error).__name__}: {error}")
        if not isinstance(verdict, Verdict):
            return _error(f"environment {name}: verify returned {verdict!r:.80}; it must return a Verdict")
        return verdict

    return grade


def _error(detail: str) -> Verdict:
    return Verdict(reward=None, outcome=Outcome.ERROR, detail=detail)

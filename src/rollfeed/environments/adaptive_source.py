"""Several environments as one source of prompts, whose levels follow what becomes of the answers.

Invariants: prompt number n depends on the run's seed and on what was learned up to the last commit, not on how many are
drawn at a time or made ahead; an environment that is taken out and put in again goes on where it was.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rollfeed.environments.difficulty import COLUMNS, DifficultyManager
from rollfeed.environments.levels import EnvironmentLevels, draw_up_to
from rollfeed.errors import ConfigError, SourceFailedError
from rollfeed.protocols import PromptSource
from rollfeed.types import Group, Prompt

_log = logging.getLogger(__name__)

_SCHEMA = 1
_AHEAD = 16
"""Draws that are decided, and their problems begun, before they are asked for."""


class AdaptiveSource(PromptSource):
    """Draws from environments at the levels that a policy chooses; never ends."""

    name = "adaptive"

    def __init__(self, levels: Sequence[EnvironmentLevels], *, manager: DifficultyManager) -> None:
        self._levels = {each.facts.environment_id: each for each in levels}
        self._manager = manager
        self._num_draws = 0
        self._decided: deque[tuple[str, int]] = deque()
        """Environments and levels of the next draws."""
        self._step_metrics: dict[str, float] = {}
        self._dormant: dict[str, Any] = {}
        """States of environments that are not in use."""

    @property
    def levels(self) -> tuple[EnvironmentLevels, ...]:
        """The levels of each environment, which make the prompts."""
        return tuple(self._levels.values())

    async def __aenter__(self) -> AdaptiveSource:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for levels in self._levels.values():
            await levels.close()

    async def draw(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts; fewer only where no environment can make more.

        Raises:
            SourceFailedError: If no environment can make any problem.
        """
        return await draw_up_to(count, self._next)

    def learn(self, group: Group) -> None:
        """Learn of a scored group of one of the environments."""
        self._manager.observe(group)

    def end_step(self) -> None:
        """Change levels by what was learned in the step."""
        self._step_metrics = self._manager.end_step(hardest={name: each.hardest for name, each in self._levels.items()})
        self._decided.clear()

    def metrics(self) -> dict[str, float]:
        """Return what the last step came to, and problems so far."""
        metrics = dict(self._step_metrics)
        #: rollout/problem_generation_seed: problems of adaptive environments made so far, failures included
        metrics["rollout/problem_generation_seed"] = float(sum(each.num_made for each in self._levels.values()))
        for each in self._levels.values():
            metrics |= each.metrics()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return position and difficulty as JSON values; ``columns`` names those of rows of ``difficulty.levels``."""
        known = {
            name: {
                "version": levels.facts.version,
                "problems": levels.state_dict(),
                "difficulty": self._manager.environments[name].state_dict(),
            }
            for name, levels in self._levels.items()
        }
        return {
            "schema": _SCHEMA,
            "policy": self._manager.policy_name,
            "num_draws": self._num_draws,
            "newest_version": self._manager.newest_version,
            "columns": list(COLUMNS),
            "environments": {**self._dormant, **known},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` returned, for the environments that are in use now.

        New ones begin at the initial level, states of others are kept for later. Of another policy's state the levels
        count, and of another version of an environment nothing.

        Raises:
            ConfigError: If another version of this package wrote it.
        """
        if state.get("schema") != _SCHEMA or state.get("columns") != list(COLUMNS):
            raise ConfigError("prompts.adaptive: the state is of another version of rollfeed: start a new run")
        self._num_draws, self._manager.newest_version = state["num_draws"], state["newest_version"]
        self._decided.clear()
        self._dormant = dict(state["environments"])
        for name, levels in self._levels.items():
            if (stored := self._dormant.pop(name, None)) is None:
                continue
            if stored["version"] != levels.facts.version:
                _log.warning(
                    "environment %s: the run was of its version %s, installed is %s: its difficulty begins anew",
                    name,
                    stored["version"],
                    levels.facts.version,
                )
                continue
            levels.load_state_dict(stored["problems"])
            self._manager.environments[name].load_state_dict(
                stored["difficulty"], same_policy=state["policy"] == self._manager.policy_name
            )

    async def _next(self) -> Prompt:
        while True:
            name, level = self._decide()
            levels = self._levels[name]
            if (prompt := await levels.draw_at(level)) is not None:
                self._num_draws += 1
                self._decided.popleft()
                return prompt
            self._decided.clear()  # by what was left before
            left = f"its levels up to {level - 1} are left" if level else "none of its levels is left"
            _log.warning("environment %s: %s: %s", name, levels.cause, left)

    def _decide(self) -> tuple[str, int]:
        """Return what the next draw takes, and have problems of those after it made."""
        hardest = {name: each.hardest for name, each in self._levels.items() if each.hardest != -1}
        if not hardest:
            causes = "; ".join(f"{name}: {each.cause}" for name, each in self._levels.items())
            raise SourceFailedError(f"prompts.adaptive: no environment can make problems any more: {causes:.1000}")
        while len(self._decided) <= _AHEAD:
            chosen = self._manager.choose(self._num_draws + len(self._decided), hardest=hardest)
            self._decided.append(chosen)
            name, level = chosen
            self._levels[name].prefetch(level)
        return self._decided[0]

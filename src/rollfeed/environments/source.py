"""An environment as a source of prompts, at a fixed level."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from rollfeed.base.waiting import without_waiting
from rollfeed.environments.levels import MAX_FAILURES, EnvironmentLevels, LevelFailedError, draw_up_to
from rollfeed.environments.making import TaskFailureKind, TaskMaker
from rollfeed.environments.tasks import TRAIN, check_level
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.protocols import Environment, PromptRenderer, PromptSource
from rollfeed.types import Prompt

_MAX_HELD_OUT_FAILURES = 100
"""In a row, for problems that are measured on: there is no other level to go to."""


class EnvironmentSource(PromptSource):
    """Makes problem after problem by index; never ends while there is a level that works.

    A problem that cannot be made, or is over ``rollout_max_prompt_len`` tokens, is counted and its index passed
    over, so that a task does not depend on what became of others. The index of a problem of the other split, which
    a :class:`~rollfeed.environments.tasks.HeldOutRule` decides by what it asks, is passed over too. Where a level
    fails again and again (:class:`~rollfeed.environments.levels.EnvironmentLevels`), it goes on at the next lower one.
    A source that is given a maker of problems, of the same seed, is to be checked before use.

    Raises:
        ConfigError: If the environment has no such level, or none of its first problems can be used.
    """

    def __init__(
        self,
        environment: Environment | TaskMaker,
        *,
        level: int,
        seed: int,
        renderer: PromptRenderer,
        split: str = TRAIN,
        apply_chat_template: bool = True,
    ) -> None:
        self.maker = environment if isinstance(environment, TaskMaker) else TaskMaker(environment, run_seed=seed)
        check_level(self.maker.facts, level)
        self.name = f"{self.maker.facts.environment_id}@{level}"
        self._level = level
        self._seed = seed
        self._split = split
        self._held_out_below: str | None = None
        self._levels = EnvironmentLevels(
            self.maker,
            renderer=renderer,
            source=self.name,
            split=split,
            apply_chat_template=apply_chat_template,
            max_failures=MAX_FAILURES if split == TRAIN else _MAX_HELD_OUT_FAILURES,
        )
        self._unused = self._levels.state_dict()
        if self.maker is not environment:
            without_waiting(self.check())

    async def __aenter__(self) -> EnvironmentSource:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.maker.close()

    @property
    def num_over_length(self) -> int:
        """Problems so far that were too long."""
        return self._levels.failures[TaskFailureKind.TOO_LONG]

    @property
    def num_failed(self) -> int:
        """Problems so far that could not be made."""
        return self._levels.failures.total() - self.num_over_length

    async def check(self) -> None:
        """Make the first problem, and forget that.

        Raises:
            ConfigError: If none of the first can be used, or none is of the split.
        """
        await self._levels.check(self._level)
        self._held_out_below = await self._levels.threshold(self._level)

    async def draw(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts.

        Raises:
            SourceFailedError: If neither the level nor one below it works any more, with the last cause.
        """
        return await draw_up_to(count, partial(self._levels.draw, self._level))

    async def draw_different(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts that ask different things, fewer where the level has no more.

        Raises:
            RunFailedError: If 100 problems in a row failed or were too long, or 3 of them hung.
        """
        seen: set[str] = set()
        prompts: list[Prompt] = []
        try:
            while len(prompts) < count and (prompt := await self._levels.find(self._level, seen=seen)) is not None:
                prompts.append(prompt)
        except LevelFailedError as error:
            raise RunFailedError(f"environment {self.name}: {error}") from error
        return prompts

    async def first(self, count: int, *, seconds: float = math.inf) -> list[Prompt]:
        """Return the first ``count`` prompts, fewer where they take longer, wherever the source is now; it stays there.

        Raises:
            SourceFailedError: As :meth:`draw`.
        """
        before, ends_at, prompts = self._levels.state_dict(), time.monotonic() + seconds, list[Prompt]()
        self._levels.load_state_dict(self._unused)
        try:
            while len(prompts) < count and time.monotonic() < ends_at:
                prompts += await self.draw(1)
            return prompts
        finally:
            self._levels.load_state_dict(before)

    def metrics(self) -> dict[str, float]:
        """Return what failed so far."""
        return self._levels.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return the index of the next problem at every level, what failed, and what it belongs to."""
        return {**self._identity(), **self._levels.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position that :meth:`state_dict` returned.

        Raises:
            ConfigError: If the state is of another environment, version, level, split or seed.
        """
        if self._held_out_below is not None and "held_out_below" not in state:
            raise ConfigError(
                f"environment {self.name}: the run is of a version that held out seeds and not problems, so "
                "it may have trained on what it is measured on: start a new run"
            )
        for key, ours in self._identity().items():
            if state.get(key) != ours:
                raise ConfigError(
                    f"environment {self.name}: {key} = {ours!r}, but the run began with {state.get(key)!r}: "
                    "go back to that, or start a new run"
                )
        if "index" in state:  # of a version that knew one level
            state = {**self._unused, "levels": {str(self._level): [state["index"], 0, []]}}
        self._levels.load_state_dict(state)

    def _identity(self) -> dict[str, Any]:
        return {
            "environment": self.maker.facts.environment_id,
            "version": self.maker.facts.version,
            "level": self._level,
            "split": self._split,
            "seed": self._seed,
            "held_out_below": self._held_out_below,
        }

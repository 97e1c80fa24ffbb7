"""An environment as a source of prompts, at a fixed level."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

from rollfeed.environments.grading import RM_TYPE
from rollfeed.environments.tasks import TRAIN, check_level, held_out_rule, make_task
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.faults import describe
from rollfeed.protocols import (
    MULTI_TURN,
    Environment,
    MultiTurnEnvironment,
    PromptRenderer,
    PromptSource,
    Task,
)
from rollfeed.types import Prompt

_MAX_FAILURES = 100
"""Problems in a row that could not be made, or were too long, before the level counts as broken."""
_MAX_PASSED_OVER = 1_000
"""Problems in a row that are of the other split, or known, before there counts as being no other."""
_KNOWN_TIMES = 10
"""The same for a level that has many: so many times those that it was seen to have."""


class EnvironmentSource(PromptSource):
    """Makes problem after problem by index; never ends.

    A problem that cannot be made, or is over ``rollout_max_prompt_len`` tokens, is counted and its index passed
    over, so that a task does not depend on what became of others. The index of a problem of the other split, which
    a :class:`~rollfeed.environments.tasks.HeldOutRule` decides by what it asks, is passed over too.

    Raises:
        ConfigError: If the environment has no such level, or none of its first problems can be used.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        level: int,
        seed: int,
        renderer: PromptRenderer,
        split: str = TRAIN,
        apply_chat_template: bool = True,
    ) -> None:
        check_level(environment, level)
        self.name = f"{environment.environment_id}@{level}"
        self.num_over_length = 0
        self.num_failed = 0
        self._environment = environment
        self._level = level
        self._seed = seed
        self._renderer = renderer
        self._split = split
        self._rule = held_out_rule(environment, level)
        self._apply_chat_template = apply_chat_template
        self._index = 0
        self._probe()

    async def draw(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts.

        Raises:
            RunFailedError: If 100 problems in a row failed or were too long, with the last cause; or if 1,000 in a row
                are of the other split.
        """
        return self.take(count)

    def take(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts, as :meth:`draw` does, where nothing can be awaited.

        Raises:
            RunFailedError: As :meth:`draw`.
        """
        return [self._next() for _ in range(count)]

    def take_different(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts that ask different things, fewer where the level has no more.

        That it has none is concluded from 1,000 problems in a row of which none is new and of the split, or from ten
        times as many as the level was seen to have.

        Raises:
            RunFailedError: If 100 problems in a row failed or were too long.
        """
        seen: set[str] = set()
        prompts: list[Prompt] = []
        while len(prompts) < count and (prompt := self._find(seen)) is not None:
            prompts.append(prompt)
        return prompts

    def first(self, count: int) -> list[Prompt]:
        """Return the first ``count`` prompts, wherever the source is now; it stays there.

        Raises:
            RunFailedError: As :meth:`draw`.
        """
        other = copy(self)
        other._index = 0
        return other.take(count)

    def state_dict(self) -> dict[str, Any]:
        """Return the index of the next problem, the counts, and what the index belongs to."""
        return {
            **self._identity(),
            "index": self._index,
            "num_over_length": self.num_over_length,
            "num_failed": self.num_failed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position that :meth:`state_dict` returned.

        Raises:
            ConfigError: If the state is of another environment, version, level, split or seed.
        """
        if self._rule is not None and "held_out_below" not in state:
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
        self._index = state["index"]
        self.num_over_length = state["num_over_length"]
        self.num_failed = state["num_failed"]

    def _identity(self) -> dict[str, Any]:
        return {
            "environment": self._environment.environment_id,
            "version": self._environment.version,
            "level": self._level,
            "split": self._split,
            "seed": self._seed,
            "held_out_below": None if self._rule is None else f"{self._rule.threshold:016x}",
        }

    def _probe(self) -> None:
        try:
            self._next()
        except RunFailedError as error:
            raise ConfigError(str(error)) from error
        self._index = self.num_over_length = self.num_failed = 0

    def _next(self) -> Prompt:
        prompt = self._find(None)
        if prompt is None:
            raise RunFailedError(
                f"environment {self.name}: of {_MAX_PASSED_OVER:,} problems in a row none is of the split "
                f"{self._split!r}, as the level has too few of them to hold one out of training: choose another level, "
                f"or measure on what is trained on with split = {TRAIN!r}"
            )
        return prompt

    def _find(self, seen: set[str] | None) -> Prompt | None:
        """Return the next prompt of the split; with ``seen`` one that asks something else than all seen before."""
        cause, num_unusable, num_passed_over = "", 0, 0
        while num_unusable < _MAX_FAILURES:
            if num_passed_over >= max(_MAX_PASSED_OVER, _KNOWN_TIMES * len(seen or ())):
                return None
            index, self._index = self._index, self._index + 1
            try:
                task = make_task(
                    self._environment, level=self._level, index=index, run_seed=self._seed, split=self._split
                )
            except Exception as error:  # of another package perhaps; counted, and named at the end
                self.num_failed += 1
                num_unusable += 1
                cause = f"problem {index}: {describe(error)}"
                continue
            is_known = seen is not None and task.identity in seen
            if seen is not None:
                seen.add(task.identity)
            if is_known or not (self._rule is None or self._rule.is_of(task.identity, self._split)):
                num_passed_over += 1
                continue
            prompt = self._render(task, index)
            if self._renderer.fits(prompt.token_ids):
                return prompt
            self.num_over_length += 1
            num_unusable += 1
            cause = f"problem {index} has {len(prompt.token_ids)} tokens, over rollout_max_prompt_len"
        raise RunFailedError(
            f"environment {self.name}: {_MAX_FAILURES} problems in a row cannot be used ({cause}): "
            "choose a lower level or a larger rollout_max_prompt_len"
        )

    def _render(self, task: Task, index: int) -> Prompt:
        try:
            rendered = self._renderer.render(task.question, apply_chat_template=self._apply_chat_template)
        except ConfigError as error:
            raise ConfigError(f"environment {self.name}: {error}") from None
        return Prompt(
            prompt_id=f"{self.name}/{self._split}/{index}",
            source=self.name,
            **rendered._asdict(),
            label=task.answer,
            metadata={
                "rm_type": RM_TYPE,
                "environment": task.environment,
                "version": task.version,
                "level": task.level,
                "seed": task.seed,
                "params": task.params,
                **({MULTI_TURN: True} if isinstance(self._environment, MultiTurnEnvironment) else {}),
            },
        )

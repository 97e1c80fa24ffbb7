"""An environment as a source of prompts, at a fixed level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollfeed.environments.grading import RM_TYPE
from rollfeed.environments.tasks import check_level, make_task
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.faults import describe
from rollfeed.protocols import Environment, PromptRenderer, Task
from rollfeed.types import Prompt

_MAX_FAILURES = 100
"""Problems in a row that could not be made, or were too long, before the level counts as broken."""


class EnvironmentSource:
    """Makes problem after problem by index; never ends.

    A problem that cannot be made, or is over ``rollout_max_prompt_len`` tokens, is counted and its index passed
    over, so that a task does not depend on what became of others.

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
        split: str = "train",
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
        self._apply_chat_template = apply_chat_template
        self._index = 0
        self._probe()

    async def draw(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts.

        Raises:
            RunFailedError: If 100 problems in a row failed or were too long; it has the last cause.
        """
        return self.take(count)

    def take(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts, as :meth:`draw` does, where nothing can be awaited.

        Raises:
            RunFailedError: As :meth:`draw`.
        """
        return [self._next() for _ in range(count)]

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
        }

    def _probe(self) -> None:
        try:
            self._next()
        except RunFailedError as error:
            raise ConfigError(str(error)) from error
        self._index = self.num_over_length = self.num_failed = 0

    def _next(self) -> Prompt:
        cause = ""
        for _ in range(_MAX_FAILURES):
            index, self._index = self._index, self._index + 1
            try:
                task = make_task(
                    self._environment, level=self._level, index=index, run_seed=self._seed, split=self._split
                )
            except Exception as error:  # of another package perhaps; counted, and named at the end
                self.num_failed += 1
                cause = f"problem {index}: {describe(error)}"
                continue
            prompt = self._render(task, index)
            if self._renderer.fits(prompt.token_ids):
                return prompt
            self.num_over_length += 1
            cause = f"problem {index} has {len(prompt.token_ids)} tokens, over rollout_max_prompt_len"
        raise RunFailedError(
            f"environment {self.name}: {_MAX_FAILURES} problems in a row cannot be used ({cause}): "
            "choose a lower level or a larger rollout_max_prompt_len"
        )

    def _render(self, task: Task, index: int) -> Prompt:
        try:
            text, token_ids = self._renderer.render(task.question, apply_chat_template=self._apply_chat_template)
        except ConfigError as error:
            raise ConfigError(f"environment {self.name}: {error}") from None
        return Prompt(
            prompt_id=f"{self.name}/{self._split}/{index}",
            source=self.name,
            text=text,
            token_ids=token_ids,
            messages=({"role": "user", "content": task.question},) if self._apply_chat_template else None,
            label=task.answer,
            metadata={
                "rm_type": RM_TYPE,
                "environment": task.environment,
                "version": task.version,
                "level": task.level,
                "seed": task.seed,
                "params": task.params,
            },
        )

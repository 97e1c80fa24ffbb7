"""Makers of the problems of an environment by index, and their failures."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollfeed.environments.tasks import (
    TRAIN,
    HasGuessRate,
    HasSplits,
    HeldOutRule,
    NoProblemError,
    check_level,
    held_out_rule,
    make_task,
)
from rollfeed.errors import RollfeedError
from rollfeed.faults import describe
from rollfeed.protocols import Environment, MultiTurnEnvironment, Task


class TaskFailureKind(StrEnum):
    """The ways in which a problem cannot be made or used."""

    RAISED = "raised"
    TIMED_OUT = "timed_out"
    """Its worker was killed at the deadline."""
    DIED = "died"
    """Its worker ended, or ran out of memory, twice."""
    NOTHING = "nothing"
    """The environment returned no question, or something else than question, params and answer."""
    TOO_LONG = "too_long"
    """Its prompt is over ``rollout_max_prompt_len``."""

    @property
    def costs_a_worker(self) -> bool:
        """Whether the worker that was to make it has ended, and another has to be started."""
        return self in (TaskFailureKind.TIMED_OUT, TaskFailureKind.DIED)


class TaskFailedError(RollfeedError):
    """Problem ``index`` of a level cannot be made or used; its index is spent."""

    def __init__(self, kind: TaskFailureKind, cause: str) -> None:
        super().__init__(cause)
        self.kind = kind
        self.cause = cause


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFacts:
    """An environment as far as it is known without its code."""

    environment_id: str
    version: int
    max_level: int | None
    """The hardest level, or None when there is always a harder one."""
    is_multi_turn: bool = False
    has_splits: bool = False
    """Whether it says itself which problems are held out."""
    summary: str = ""
    guess_rate: tuple[float, float] | None = None
    """At level 0, where it declares any."""
    needs_marker: bool = False
    """Whether it reads answers between marks only, for which its questions do not ask."""

    @classmethod
    def of(cls, environment: Environment) -> EnvironmentFacts:
        """Return the facts of an environment of this process."""
        return cls(
            environment_id=environment.environment_id,
            version=environment.version,
            max_level=environment.max_level,
            is_multi_turn=isinstance(environment, MultiTurnEnvironment),
            has_splits=isinstance(environment, HasSplits),
            summary=environment.summary,
            guess_rate=environment.guess_rate(0) if isinstance(environment, HasGuessRate) else None,
            needs_marker=bool(getattr(environment, "needs_marker", False)),
        )


class TaskMaker:
    """Makes the problems of one environment at once, in this process, which is for those that are trusted to be quick.

    Problem ``index`` depends on (run seed, split, environment with its parameters, version, level, index) only,
    whatever was made before, in which order and by how many workers.
    """

    def __init__(self, environment: Environment, *, run_seed: int) -> None:
        self.facts = EnvironmentFacts.of(environment)
        self._environment = environment
        self._run_seed = run_seed

    async def make(self, *, level: int, index: int, split: str = TRAIN) -> Task:
        """Return problem ``index`` of a level; whether it is of the split is not asked.

        Raises:
            TaskFailedError: If it cannot be made.
            ConfigError: If there is no such level, or no worker can be started.
        """
        return make_or_fail(self._environment, level=level, index=index, run_seed=self._run_seed, split=split)

    def prefetch(self, *, level: int, index: int, split: str = TRAIN) -> None:
        """Have a few problems made from ``index`` on, as they will be asked for next, where that takes time."""

    async def held_out_rule(self, level: int) -> HeldOutRule | None:
        """Return what is held out of training at a level; see :func:`rollfeed.environments.tasks.held_out_rule`.

        Raises:
            TaskFailedError: If its first problems cannot be made in time.
        """
        return held_out_rule(self._environment, level)

    async def close(self) -> None:
        """End what is under way."""


def make_or_fail(environment: Environment, *, level: int, index: int, run_seed: int, split: str) -> Task:
    """Make a problem as :func:`rollfeed.environments.tasks.make_task` does.

    Raises:
        TaskFailedError: If the environment raises, or returns no problem.
        ConfigError: If it has no such level.
    """
    check_level(environment, level)
    try:
        return make_task(environment, level=level, index=index, run_seed=run_seed, split=split)
    except NoProblemError as error:
        raise TaskFailedError(TaskFailureKind.NOTHING, str(error)) from error
    except Exception as error:  # of another package perhaps
        raise TaskFailedError(TaskFailureKind.RAISED, describe(error)) from error

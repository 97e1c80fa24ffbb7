"""The problems of an environment as prompts, level by level, and what becomes of levels that have none.

Invariants: a level's problems are handed out by index; an index whose problem fails, or is of the other split, is
spent; a level that fails again and again is given up, whatever its generator does, so that nobody waits for it twice.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollfeed.environments.grading import RM_TYPE
from rollfeed.environments.making import TaskFailedError, TaskFailureKind, TaskMaker
from rollfeed.environments.tasks import TRAIN, HeldOutRule
from rollfeed.errors import ConfigError, RollfeedError, SourceFailedError
from rollfeed.protocols import MULTI_TURN, PromptRenderer, Task
from rollfeed.types import Picture, Prompt

_log = logging.getLogger(__name__)

MAX_FAILURES = 5
"""Problems in a row that cannot be made or used, after which a level is given up."""
MAX_KILLED, KILLED_OF = 3, 100
"""The same for so many of that many that had to be killed: each costs a worker its deadline."""
_MAX_PASSED_OVER = 1_000
"""Problems in a row that are of the other split, or known, before there counts as being no other."""
_KNOWN_TIMES = 10
"""The same for a level that has many: so many times those that it was seen to have."""


async def draw_up_to(count: int, draw: Callable[[], Awaitable[Prompt]]) -> list[Prompt]:
    """Return ``count`` prompts, or those before it fails. Raises SourceFailedError where the first does."""
    prompts: list[Prompt] = []
    try:
        while len(prompts) < count:
            prompts.append(await draw())
    except SourceFailedError:
        if not prompts:
            raise
    return prompts


class LevelFailedError(RollfeedError):
    """A level has too many problems in a row that cannot be made or used."""


@dataclass(slots=True)
class _Level:
    index: int = 0
    """Of the next problem."""
    num_failures: int = 0
    """In a row, up to now."""
    killed: list[int] = field(default_factory=list)
    """Indices of the last that had to be."""

    @property
    def has_too_many_killed(self) -> bool:
        return len(self.killed) == MAX_KILLED and self.index - self.killed[0] <= KILLED_OF


class EnvironmentLevels:
    """Makes prompts of the problems of one environment at its levels.

    A level of which 5 problems in a row cannot be made or are over ``rollout_max_prompt_len``, or 3 of 100 had to be
    killed, is given up: the next lower one is the hardest from then on. ``source`` names the source of the prompts.
    """

    def __init__(
        self,
        maker: TaskMaker,
        *,
        renderer: PromptRenderer,
        source: str,
        split: str = TRAIN,
        apply_chat_template: bool = True,
        max_failures: int = MAX_FAILURES,
    ) -> None:
        self.facts = maker.facts
        self.hardest = maker.facts.max_level
        """The hardest level that can be drawn from, None where there is no such; -1 where no level can be."""
        self.cause = ""
        """Why a level was given up, of the last one."""
        self.failures: Counter[TaskFailureKind] = Counter()
        """Problems that could not be made or used so far."""
        self.maker = maker
        self._renderer = renderer
        self._source = source
        self._split = split
        self._apply_chat_template = apply_chat_template
        self._max_failures = max_failures
        self._levels: dict[int, _Level] = {}
        self._rules: dict[int, HeldOutRule | None] = {}

    @property
    def num_made(self) -> int:
        """Problems so far, failures and those of the other split included."""
        return sum(level.index for level in self._levels.values())

    async def draw(self, level: int) -> Prompt:
        """Return the next prompt of a level, or of the next lower one that has any.

        Raises:
            SourceFailedError: If no level has.
        """
        while True:
            level = level if self.hardest is None else min(level, self.hardest)
            if level < 0:
                raise SourceFailedError(f"environment {self.facts.environment_id}: no level is left: {self.cause}")
            if (prompt := await self.draw_at(level)) is not None:
                return prompt
            if level:
                _log.warning("environment %s: goes on at level %d: %s", self._source, level - 1, self.cause)

    async def draw_at(self, level: int) -> Prompt | None:
        """Return the next prompt of exactly this level; None where it is given up now, and ``cause`` says why."""
        try:
            if (prompt := await self.find(level)) is not None:
                return prompt
            cause = self.no_other()
        except LevelFailedError as error:
            cause = str(error)
        self.hardest, self.cause = level - 1, f"level {level}: {cause}"
        return None

    async def find(self, level: int, *, seen: set[str] | None = None) -> Prompt | None:
        """Return the next prompt of exactly this level; None where there is no other of the split.

        That is concluded from 1,000 problems in a row, or from ten times as many as the level was seen to have.

        Args:
            level: One that the environment has.
            seen: Identities of problems that are passed over; all that come are added.

        Raises:
            LevelFailedError: If too many in a row cannot be used, and whenever it is asked again then.
        """
        at, num_passed_over, cause = self._levels.setdefault(level, _Level()), 0, "before"
        while at.num_failures < self._max_failures and not at.has_too_many_killed:
            if num_passed_over >= max(_MAX_PASSED_OVER, _KNOWN_TIMES * len(seen or ())):
                return None
            rule = await self._rule(level)
            made = await self._made(level, at.index)
            index, at.index = at.index, at.index + 1
            if isinstance(made, Task):
                is_known = seen is not None and made.identity in seen
                if seen is not None:
                    seen.add(made.identity)
                if is_known or not (rule is None or rule.is_of(made.identity, self._split)):
                    num_passed_over += 1
                    continue
            found = self._rendered(made, index) if isinstance(made, Task) else made
            if isinstance(found, Prompt):
                at.num_failures = 0
                return found
            self.failures[found.kind] += 1
            at.num_failures += 1
            if found.kind.costs_a_worker:
                at.killed = [*at.killed, index][-MAX_KILLED:]
            cause = f"problem {index}: {found.cause}"
        if at.has_too_many_killed:
            raise LevelFailedError(f"{MAX_KILLED} of {at.index - at.killed[0]} problems had to be killed ({cause})")
        raise LevelFailedError(f"{at.num_failures} problems in a row cannot be used ({cause})")

    def no_other(self) -> str:
        """Return what :meth:`find` has concluded where it found none, for people."""
        return (
            f"of {_MAX_PASSED_OVER:,} problems in a row none is of the split {self._split!r}, as the level has too few "
            "of them to hold one out of training: choose another level, or measure on what is trained on with "
            f"split = {TRAIN!r}"
        )

    async def close(self) -> None:
        """End what is made ahead."""
        await self.maker.close()

    def prefetch(self, level: int) -> None:
        """Have the next problems of a level made, as it will be drawn from."""
        at = self._levels.get(level) or _Level()
        self.maker.prefetch(level=level, index=at.index, split=self._split)

    async def check(self, level: int) -> None:
        """Make the first problem of a level, and forget that.

        Raises:
            ConfigError: If none of the first can be used, or none is of the split.
        """
        before, where = self.state_dict(), f"environment {self.facts.environment_id}@{level}"
        try:
            prompt = await self.find(level)
        except LevelFailedError as error:
            remedy = "choose a lower level, or raise rollout_max_prompt_len or make_timeout_seconds"
            raise ConfigError(f"{where}: {error}: {remedy}") from error
        finally:
            self.load_state_dict(before)
        if prompt is None:
            raise ConfigError(f"{where}: {self.no_other()}")

    async def threshold(self, level: int) -> str | None:
        """Return what tells which problems of a level are held out; None where the environment has its own splits.

        Raises:
            LevelFailedError: If no problem of the level can be made in time.
        """
        rule = await self._rule(level)
        return None if rule is None else f"{rule.threshold:016x}"

    def metrics(self) -> dict[str, float]:
        """Return what failed so far, by the environment's id."""
        name = f"environments/{self.facts.environment_id}"
        #: environments/<id>/<kind>: unusable problems so far, that raised, timed_out, died, nothing or too_long
        found = {f"{name}/{kind}": float(count) for kind, count in sorted(self.failures.items())}
        if self.hardest != self.facts.max_level and self.hardest is not None:
            #: environments/<id>/hardest: hardest level that is left, after one was given up; -1 where none is
            found[f"{name}/hardest"] = float(self.hardest)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the position at every level, and what was given up, as JSON values."""
        return {
            "levels": {
                str(level): [at.index, at.num_failures, at.killed] for level, at in sorted(self._levels.items())
            },
            "hardest": self.hardest,
            "cause": self.cause,
            "failures": dict(sorted(self.failures.items())),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where :meth:`state_dict` was called."""
        self._levels = {int(level): _Level(*at) for level, at in state["levels"].items()}
        self.hardest, self.cause = state["hardest"], state["cause"]
        self.failures = Counter({TaskFailureKind(kind): count for kind, count in state["failures"].items()})

    async def _rule(self, level: int) -> HeldOutRule | None:
        if level not in self._rules:
            try:
                self._rules[level] = await self.maker.held_out_rule(level)
            except TaskFailedError as error:
                raise LevelFailedError(f"its first problems cannot be made in time ({error.cause})") from error
        return self._rules[level]

    async def _made(self, level: int, index: int) -> Task | TaskFailedError:
        try:
            return await self.maker.make(level=level, index=index, split=self._split)
        except TaskFailedError as error:
            return error

    def _pictures(self, task: Task) -> list[Picture]:
        loader = self._renderer.loader
        if loader is None:
            raise ConfigError("its problems have pictures, which the model, [teacher] or [cluster] does not take")
        try:
            return [loader.load(picture) for picture in task.pictures]
        except ValueError as error:
            raise ConfigError(f"a picture of its problems cannot be used: {error}") from error

    def _rendered(self, task: Task, index: int) -> Prompt | TaskFailedError:
        try:
            shown: dict[str, Any] = {"images": self._pictures(task)} if task.pictures else {}
            rendered = self._renderer.render(task.question, apply_chat_template=self._apply_chat_template, **shown)
        except ConfigError as error:
            raise ConfigError(f"environment {self._source}: {error}") from None
        if not self._renderer.fits(rendered.token_ids):
            cause = f"{len(rendered.token_ids)} tokens, over rollout_max_prompt_len"
            return TaskFailedError(TaskFailureKind.TOO_LONG, cause)
        return Prompt(
            prompt_id=f"{task.environment}@{task.level}/{self._split}/{index}",
            source=self._source,
            **rendered._asdict(),
            label=task.answer,
            metadata={
                "rm_type": RM_TYPE,
                "environment": task.environment,
                "version": task.version,
                "level": task.level,
                "seed": task.seed,
                "params": task.params,
                **({MULTI_TURN: True} if self.facts.is_multi_turn else {}),
            },
        )

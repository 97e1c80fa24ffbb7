"""Tries environments in workers, level by level: which keep their promises, and which levels are of no use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollfeed.environments import EnvironmentRegistry
from rollfeed.environments.level_trial import level_path
from rollfeed.environments.making import EnvironmentFacts, describe_environments, worker_failure
from rollfeed.errors import PluginError, WorkerError
from rollfeed.workers import WorkerPool

_DEFAULT_LEVELS = (0, 1, 2, 4, 8)
"""And the hardest."""


class Conformance(StrEnum):
    """The outcome of trying a level, or an environment: its worst level's."""

    PASSED = "passed"
    QUARANTINED = "quarantined"
    """Its problems cannot be made in time, or at all, or are too long: a run would give the level up."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelReport:
    """A level that was tried."""

    level: int
    outcome: Conformance
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    numbers: dict[str, Any] = field(default_factory=dict)
    """``num_problems``, ``reads`` (the forms of answers), ``guessed`` (the share that blind answers solve),
    ``verify_ms`` and ``mean_prompt_chars``, as far as it was tried."""


@dataclass(slots=True, kw_only=True)
class EnvironmentReport:
    """An environment that was tried, from its lowest level up to the first that is of no use."""

    environment_id: str
    version: int | None = None
    error: str | None = None
    """Why it could not be tried at all."""
    levels: list[LevelReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> Conformance:
        """FAILED if it cannot be loaded or a level fails, QUARANTINED if its lowest level is, else PASSED."""
        outcomes = [level.outcome for level in self.levels]
        if self.error is not None or Conformance.FAILED in outcomes:
            return Conformance.FAILED
        return Conformance.QUARANTINED if outcomes[:1] == [Conformance.QUARANTINED] else Conformance.PASSED


async def check_environments(
    environment_ids: Sequence[str],
    *,
    levels: Sequence[int] | None = None,
    num_problems: int = 20,
    deadline_seconds: float = 10.0,
    num_workers: int = 1,
    folders: Sequence[Path] = (),
    on_report: Callable[[EnvironmentReport], None] | None = None,
) -> list[EnvironmentReport]:
    """Try environments, each level in two processes that are killed at its deadline, and return reports in order.

    Tried are those of the ``levels`` that an environment has, by default 0, 1, 2, 4, 8 and the hardest, with
    ``num_problems`` each; ``num_workers`` environments are tried at once. Raises ConfigError if no worker starts.
    """
    reports = [EnvironmentReport(environment_id=each) for each in environment_ids]
    waiting, adapted = iter(reports), EnvironmentRegistry().adapted()

    async def try_next() -> None:
        pools = WorkerPool(num_workers=1), WorkerPool(num_workers=1), WorkerPool(num_workers=1, hash_seed=1)
        async with pools[0] as one, pools[1] as alike, pools[2] as other:
            for report in waiting:
                # Packages that are adapted are as they are: in the workers of a run, hashes are seeded alike.
                second = alike if report.environment_id in adapted else other
                trial = _Trial(report, (one, second), num_problems, deadline_seconds)
                await trial.run(levels, folders)
                if on_report is not None:
                    on_report(report)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(num_workers, len(reports))):
            tasks.create_task(try_next())
    return reports


@dataclass(frozen=True, slots=True)
class _Trial:
    report: EnvironmentReport
    workers: tuple[WorkerPool, WorkerPool]
    num_problems: int
    deadline_seconds: float

    async def run(self, levels: Sequence[int] | None, folders: Sequence[Path]) -> None:
        report, longest = self.report, 0.0
        try:
            for workers in self.workers:
                (facts,) = await describe_environments([(report.environment_id, {})], workers=workers, folders=folders)
        except PluginError as error:
            report.error = str(error)
            return
        report.environment_id, report.version = facts.environment_id, facts.version
        for level in _levels_of(facts, levels):
            found = await self._try(level)
            report.levels.append(found)
            if found.outcome is Conformance.QUARANTINED:
                break  # higher ones are no better, and would cost a deadline each
            length = found.numbers.get("mean_prompt_chars", longest)
            if length < longest / 2:
                report.warnings.append(f"prompts of level {level} are less than half as long as those of a lower one")
            longest = max(longest, length)

    async def _try(self, level: int) -> LevelReport:
        """Try a level in one process, and make its problems in another one, whose hashes are seeded otherwise."""
        path, seconds = level_path(self.report.environment_id), self.deadline_seconds / 4

        async def call(workers: WorkerPool, verifies: bool) -> dict[str, Any] | WorkerError:
            try:
                found: dict[str, Any] = await workers.call(
                    path, [level, self.num_problems, seconds, verifies], deadline_seconds=self.deadline_seconds
                )
            except WorkerError as error:
                return error
            return found

        tried, made = await asyncio.gather(call(self.workers[0], True), call(self.workers[1], False))
        if isinstance(made, WorkerError):
            failure = worker_failure(made)
            return LevelReport(
                level=level, outcome=Conformance.QUARANTINED, reasons=(f"{failure.kind}: {failure.cause}",)
            )
        if isinstance(tried, WorkerError):
            return LevelReport(level=level, outcome=Conformance.FAILED, reasons=(f"when it is tried: {tried}",))
        if tried["unusable"] is not None:
            kind, cause = tried["unusable"]
            return LevelReport(level=level, outcome=Conformance.QUARANTINED, reasons=(f"{kind}: {cause}",))
        reasons = tuple(tried["problems"])
        if any(ours != theirs for ours, theirs in zip(tried["digests"], made["digests"], strict=False)):
            reasons += ("the same seed makes another problem in another process",)
        names = ("reads", "guessed", "verify_ms", "mean_prompt_chars")
        return LevelReport(
            level=level,
            outcome=Conformance.FAILED if reasons else Conformance.PASSED,
            reasons=reasons,
            warnings=tuple(tried["warnings"]),
            numbers={"num_problems": len(tried["digests"]), **{name: tried[name] for name in names}},
        )


def _levels_of(facts: EnvironmentFacts, levels: Sequence[int] | None) -> list[int]:
    hardest = facts.max_level
    chosen = levels or (*_DEFAULT_LEVELS, *(() if hardest is None else (hardest,)))
    return sorted({level for level in chosen if hardest is None or level <= hardest})

"""All judges of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cached_property
from pathlib import Path

from rollfeed.base.waiting import all_at_once
from rollfeed.config.judge import JudgeSettings
from rollfeed.config.reward import JUDGE_RM_TYPE, RewardSettings
from rollfeed.rewards.calls import GroupGrader, OwnPace
from rollfeed.rewards.judging.counts import JudgeCounts
from rollfeed.rewards.judging.judge import Judge
from rollfeed.rewards.judging.panel import Panel
from rollfeed.rewards.labels import LabelProblem


class Judges:
    """Makes the judges of the settings when they are asked for; entering asks each whether it can do what it has to.

    Files with rubrics are looked for in ``folders``.
    """

    def __init__(self, settings: RewardSettings, *, folders: Sequence[Path] = ()) -> None:
        self._settings, self._folders = settings, folders
        self.counts = JudgeCounts()
        """Of what was asked since metrics were taken."""

    @cached_property
    def by_rm_type(self) -> Mapping[str, Judge | Panel]:
        """All of them, by their ``rm_type``. Raises ConfigError as :class:`Judge`."""
        settings = self._settings
        named = {
            name: self._made(each, f"reward.judges.{name}") for name, each in settings.judges.items() if not each.panel
        }

        def found(each: JudgeSettings, name: str) -> Judge | Panel:
            if each.panel:
                return Panel(each, [named[member] for member in each.panel], counts=self.counts)
            return named.get(name) or self._made(each, "reward.judge")

        judges = {f"{JUDGE_RM_TYPE}:{name}": found(each, name) for name, each in settings.judges.items()}
        return judges if settings.judge is None else {**judges, JUDGE_RM_TYPE: found(settings.judge, "")}

    def _made(self, settings: JudgeSettings, name: str) -> Judge:
        return Judge(settings, name=name, folders=self._folders, counts=self.counts)

    def graders(self) -> dict[str, OwnPace]:
        """Return each as a grader, by its ``rm_type``."""
        return {
            rm_type: GroupGrader(judge, compare=judge.compare) if judge.compares_group else OwnPace(judge)
            for rm_type, judge in self.by_rm_type.items()
        }

    def problems(self) -> dict[str, LabelProblem]:
        """Return why each could judge no answer by a label and metadata, by its ``rm_type``."""
        return {rm_type: judge.problem for rm_type, judge in self.by_rm_type.items()}

    async def __aenter__(self) -> Judges:
        """Ask each judge for one token. Raises ConfigError if one does not answer as it has to."""
        judges = {judge.name: judge for each in self.by_rm_type.values() for judge in each.judges}
        async with AsyncExitStack() as entered:
            for judge in judges.values():
                entered.push_async_callback(judge.close)
            await all_at_once(judge.probe() for judge in judges.values())
            self._entered = entered.pop_all()
        self.counts.take()
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self._entered.aclose()

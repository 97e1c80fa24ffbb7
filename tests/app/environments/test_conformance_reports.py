"""Environments are tried in workers, and each broken promise is found."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollfeed.app.environments.conformance import Conformance, EnvironmentReport, check_environments
from rollfeed.environments.registry import named_by_path

HERE = Path(__file__).parent

FAILED = {
    "OtherEachTime": "the same seed makes another problem a second time",
    "OtherInAnotherProcess": "the same seed makes another problem in another process",
    "DrawsGlobally": "make changes the global random state",
    "ReadsGlobally": "the same seed makes another problem a second time",
    "LosesTuples": "a verdict is another one after the params were stored as JSON",
    "NotJson": "params are no JSON",
    "RefusesItsAnswer": "its own answer is not accepted: ",
    "TakesAnything": "what is no answer is right: '?!'",
    "Guessed": "blind answers are right more often than in 1.0%: '0' in ",
    "RewardsWrongAnswers": "a wrong answer is worth more than a right one",
    "RewardsTooMuch": "a reward is no number from -1 to 1: 7.0",
    "SaysNotWhetherRight": "a verdict does not say whether the answer is right",
    "ReturnsNumbers": "verify returns no Verdict, but 1.0",
    "VerifyRaises": "verify raises ValueError",
    "ChangesParams": "verify changes the params that it is given",
    "Slow": "verify takes more than 50 ms",
    "VerifyHangs": "when it is tried: no result within",
    "TalksDifferently": "the same turn in the same state is answered otherwise a second time",
}
QUARANTINED = {
    "MakeRaises": (2, "raised: ValueError: no such puzzle"),
    "MakeReturnsNothing": (0, "nothing: make returned None"),
    "MakeHangs": (1, "timed_out: "),
    "MakeKills": (0, "died: "),
    "TooLong": (1, "too_long: a question has 30,0"),
}
WARNED = {
    "Shrinks": "prompts of level 1 are less than half as long as those of a lower one",
    "RaisesNowAndThen": "problems cannot be made, the last: ValueError: not this one",
    "Talks": "go on after 1,000 turns",
}


@pytest.fixture(scope="module")
def reports() -> dict[str, EnvironmentReport]:
    """All misfits, tried at once."""
    names = ["Sound", *FAILED, *QUARANTINED, *WARNED, "NoSuchClass"]
    hanging = [name for name in names if name.endswith("Hangs")]
    others = [name for name in names if name not in (*hanging, "Slow")]

    async def tried(chosen: list[str], levels: list[int], **how: Any) -> dict[str, EnvironmentReport]:
        paths = [f"misfits.py:{name}" for name in chosen]
        return dict(zip(chosen, await check_environments(paths, levels=levels, folders=[HERE], **how), strict=True))

    async def all_tried() -> dict[str, EnvironmentReport]:
        return {
            **await tried(others, [0, 1, 2], num_problems=8, deadline_seconds=120.0),
            **await tried(["Slow"], [0], num_problems=1, deadline_seconds=120.0),
            **await tried(hanging, [0, 1], num_problems=8, deadline_seconds=3.0, num_workers=2),
        }

    try:
        return asyncio.run(all_tried())
    finally:
        for name in names:
            named_by_path.pop(f"bad/{name}", None)


def test_sound_environment_passes_at_every_level(reports: dict[str, EnvironmentReport]) -> None:
    report = reports["Sound"]
    assert (report.environment_id, report.version, report.outcome) == ("bad/Sound", 1, Conformance.PASSED)
    assert [level.level for level in report.levels] == [0, 1, 2]
    assert all(level.numbers["reads"] == ["plain", "tags"] for level in report.levels)
    assert not any(level.reasons or level.warnings for level in report.levels)


@pytest.mark.parametrize("name", FAILED)
def test_broken_promise_is_found(reports: dict[str, EnvironmentReport], name: str) -> None:
    assert reports[name].outcome is Conformance.FAILED
    reasons = [reason for level in reports[name].levels for reason in level.reasons]
    assert any(reason.startswith(FAILED[name]) for reason in reasons), reasons


@pytest.mark.parametrize(
    "name", sorted(FAILED.keys() - {"OtherEachTime", "RefusesItsAnswer", "ReadsGlobally", "TalksDifferently"})
)
def test_nothing_else_is_found(reports: dict[str, EnvironmentReport], name: str) -> None:
    reasons = {reason for level in reports[name].levels for reason in level.reasons}
    assert all(reason.startswith(FAILED[name]) for reason in reasons), reasons


@pytest.mark.parametrize("name", QUARANTINED)
def test_level_without_problems_is_quarantined_and_ends_the_trial(
    reports: dict[str, EnvironmentReport], name: str
) -> None:
    level, reason = QUARANTINED[name]
    *lower, last = reports[name].levels
    assert [each.outcome for each in lower] == [Conformance.PASSED] * level
    assert (last.level, last.outcome) == (level, Conformance.QUARANTINED)
    assert last.reasons[0].startswith(reason)
    assert reports[name].outcome is (Conformance.PASSED if level else Conformance.QUARANTINED)


@pytest.mark.parametrize("name", WARNED)
def test_what_may_be_meant_so_is_a_warning(reports: dict[str, EnvironmentReport], name: str) -> None:
    report = reports[name]
    assert report.outcome is Conformance.PASSED
    assert any(
        WARNED[name] in each for each in [*report.warnings, *(w for level in report.levels for w in level.warnings)]
    )


def test_environment_that_cannot_be_loaded_fails(reports: dict[str, EnvironmentReport]) -> None:
    assert reports["NoSuchClass"].outcome is Conformance.FAILED
    assert "NoSuchClass" in str(reports["NoSuchClass"].error)

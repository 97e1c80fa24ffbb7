from __future__ import annotations

from pathlib import Path

import pytest

from rollfeed import app
from rollfeed.config import SamplingSettings
from rollfeed.errors import ConfigError
from rollfeed.evaluation import Calibration
from rollfeed.testing import CharTokenizer, ScriptedEngine, ScriptedRequest

MODEL = app.Model(checkpoint=Path(), tokenizer=CharTokenizer())


def reverses_short_words(request: ScriptedRequest) -> str:
    """Always right with two symbols, with three when the seed is a multiple of 3, never with more."""
    word = CharTokenizer().decode(request.token_ids, skip_special_tokens=True).partition("rev:")[2].partition("=")[0]
    is_right = len(word) == 2 or (len(word) == 3 and (request.params.seed or 0) % 3 == 0)
    return word[::-1] if is_right else "?"


async def calibrated(**settings: object) -> Calibration:
    levels = settings.pop("levels", [2, 0, 1])
    arguments = {"num_samples": 60, "parameters": {"style": "compact"}, **settings}
    (found,) = await app.calibrate_environments(
        {"core/reverse_text": levels}, model=MODEL, engine=ScriptedEngine(answer=reverses_short_words), **arguments
    )
    return found


async def test_recommended_is_the_lowest_level_with_headroom() -> None:
    calibration = await calibrated()
    assert [each.level for each in calibration.levels] == [0, 1, 2]
    easy, middle, hard = (each.found.accuracy for each in calibration.levels)
    assert (easy, hard) == (1.0, 0.0)
    assert 0.05 <= middle <= 0.6  # type: ignore[operator]
    assert calibration.recommended == 1


async def test_where_no_level_has_headroom_none_is_recommended() -> None:
    assert (await calibrated(levels=[0, 2])).recommended is None


async def test_answers_that_are_cut_depress_the_accuracy_and_it_is_said() -> None:
    """Words of three symbols are never ended by themselves unless they are right."""

    def answer(request: ScriptedRequest) -> str:
        written = reverses_short_words(request)
        return written if written != "?" else "?" * 100

    sampling = SamplingSettings(rollout_max_response_len=8)
    (found,) = await app.calibrate_environments(
        {"core/reverse_text": [0, 1, 2]},
        model=MODEL,
        num_samples=60,
        sampling=sampling,
        parameters={"style": "compact"},
        engine=ScriptedEngine(answer=answer),
    )
    all_right, some_right, none_right = found.levels
    assert (all_right.is_cut_short, all_right.accuracy_of_ended) == (False, 1.0)
    assert some_right.found.accuracy < 0.6  # type: ignore[operator]
    assert (some_right.is_cut_short, some_right.accuracy_of_ended) == (True, 1.0)
    assert (none_right.is_cut_short, none_right.accuracy_of_ended) == (True, None)


async def test_wrong_answers_that_end_are_not_cut_short() -> None:
    assert not any(each.is_cut_short for each in (await calibrated()).levels)


async def test_every_problem_is_answered_once_and_from_its_own_split() -> None:
    calibration = await calibrated(levels=[2], num_samples=20)
    groups = calibration.levels[0].found.groups
    assert [len(group.rollouts) for group in groups] == [1] * 20
    assert all("/probe/" in group.prompt.prompt_id for group in groups)


async def test_a_level_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="levels are 0 to 40"):
        await calibrated(levels=[41])

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from rollfeed.app.rewards import open_reward_hub
from rollfeed.config import RewardSettings
from rollfeed.config.mixture import MixturePartSettings
from rollfeed.errors import ConfigError
from rollfeed.rewards.calls import OfSamples
from rollfeed.rewards.hub import RewardHub
from rollfeed.rewards.registry import BUILTIN_GRADERS
from rollfeed.types import Correct, Outcome, Prompt, Rollout, Sample, Verdict

MakePrompt = Callable[..., Prompt]
MakeRollout = Callable[..., Rollout]


async def by_length(sample: Sample, prompt: Prompt) -> Verdict:
    """Stands for a model: a number for any answer but "broken"."""
    if sample.response == "broken":
        return Verdict.failed("it broke", Outcome.TIMEOUT)
    return Verdict(reward=float(len(sample.response)), step_scores=(1.0, 2.0))


def hub(parts: list[dict[str, Any]] | None = None, **settings: Any) -> RewardHub:
    mixture = [MixturePartSettings(**part) for part in parts or ()]
    own = {"rm_type": "mixture", "reward_key": "mixture"} if mixture else {}
    graders: Mapping[str, Any] = {**BUILTIN_GRADERS, "by_length": OfSamples(by_length)}
    return RewardHub(graders=graders, mixture=mixture, timeout_seconds=60.0, **{**own, **settings})


PARTS = [
    {"rm_type": "by_length", "weight": 0.5},
    {"rm_type": "exact", "weight": 2, "name": "right"},
    {"rm_type": "f1", "weight": 0},
]


async def test_a_mixture_is_the_weighted_sum_and_every_part_is_stored(
    make_prompt: MakePrompt, make_rollout: MakeRollout
) -> None:
    prompt = make_prompt("42")
    right, wrong = await hub(PARTS).score([make_rollout(0, "42"), make_rollout(1, "4 2")], prompt)
    assert right.reward == {"by_length": 2.0, "right": 1.0, "f1": 1.0, "mixture": 3.0}
    assert wrong.reward == {"by_length": 3.0, "right": 0.0, "f1": 0.0, "mixture": 1.5}
    assert (right.correct, wrong.correct) == (Correct.YES, Correct.NO)
    assert right.step_scores == (1.0, 2.0)


async def test_a_part_that_fails_is_the_failure_of_the_whole(
    make_prompt: MakePrompt, make_rollout: MakeRollout
) -> None:
    (verdict,) = await hub(PARTS).score([make_rollout(0, "broken")], make_prompt("broken"))
    assert (verdict.outcome, verdict.reward) == (Outcome.TIMEOUT, None)
    assert verdict.detail == "part 'by_length' of the mixture: it broke"


async def test_functions_and_named_numbers_are_parts(make_prompt: MakePrompt, make_rollout: MakeRollout) -> None:
    def style(sample: Sample, prompt: Prompt) -> dict[str, float]:
        return {"tone": 0.25, "length": 9.0}

    parts = [{"function": "style", "reward_key": "tone", "weight": 4}, {"rm_type": "exact"}]
    (verdict,) = await hub(parts, named_reward_fns={"style": style}).score([make_rollout(0, "a")], make_prompt("b"))
    assert verdict.reward == {"style": 0.25, "exact": 0.0, "mixture": 1.0}
    (verdict,) = await hub([{"function": "style"}], named_reward_fns={"style": style}).score(
        [make_rollout(0, "a")], make_prompt("b")
    )
    assert verdict.outcome is Outcome.ERROR


async def test_rows_may_choose_another_grader_than_the_mixture(
    make_prompt: MakePrompt, make_rollout: MakeRollout
) -> None:
    (verdict,) = await hub(PARTS).score([make_rollout(0, "a")], make_prompt("a", rm_type="exact"))
    assert verdict.reward == 1.0


async def test_a_verifier_says_what_is_right_and_changes_no_reward(
    make_prompt: MakePrompt, make_rollout: MakeRollout
) -> None:
    scorer = hub(rm_type="by_length", verifier="exact")
    rollouts = [make_rollout(0, "42"), make_rollout(1, "43"), make_rollout(2, "broken")]
    right, wrong, broken = await scorer.score(rollouts, make_prompt("42"))
    assert [each.correct for each in (right, wrong)] == [Correct.YES, Correct.NO]
    assert [each.reward for each in (right, wrong, broken)] == [2.0, 2.0, None]
    (unlabelled,) = await scorer.score([make_rollout(0, "42")], make_prompt(None))
    assert (unlabelled.correct, unlabelled.reward) == (Correct.UNDEFINED, 2.0)


async def test_a_grader_of_samples_scores_single_responses_and_no_boxes(make_prompt: MakePrompt) -> None:
    assert (await hub(rm_type="by_length").grade("four", None)).reward == 4.0
    assert "no such grader" in str(hub(rm_type="by_length").problem("boxed_by_length"))


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([{"rm_type": "exakt"}], "no such grader"),
        ([{"function": "nobody"}], "no such function"),
        ([{"rm_type": "exact"}, {"rm_type": "f1", "name": "exact"}], "names two parts"),
    ],
)
def test_parts_that_nothing_scores_are_refused(parts: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        hub(parts)
    with pytest.raises(ConfigError, match=r"reward\.verifier"):
        hub(rm_type="exact", verifier="exakt")


@pytest.mark.parametrize(
    "settings",
    [
        {"mixture": [{"rm_type": "exact", "function": "own"}]},
        {"mixture": [{"weight": 1.0}]},
        {"mixture": [{"rm_type": "mixture"}]},
        {"mixture": [{"rm_type": "exact", "name": "mixture"}]},
        {"mixture": [{"rm_type": "exact"}], "reward_key": "other"},
        {"model": {"servers": ["http://127.0.0.1:1"]}},
        {"model": {"checkpoint": "x", "servers": ["http://127.0.0.1:1"], "unit": "step"}},
        {"model": {"checkpoint": "x", "servers": ["http://127.0.0.1:1"], "kind": "tei", "input": "token_ids"}},
        {"model": {"checkpoint": "x", "step_token": "."}},
        {"model": {"checkpoint": "x", "unit": "step", "step_token": ".", "input": "token_ids"}},
    ],
)
def test_settings_that_cannot_score_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RewardSettings(**settings)


async def test_the_settings_make_the_mixture() -> None:
    settings = RewardSettings(mixture=[{"rm_type": "exact"}, {"rm_type": "f1", "weight": 0.5}])
    assert (settings.rm_type, settings.reward_key) == ("mixture", "mixture")
    async with open_reward_hub(settings) as made:
        assert (await made.grade("b c", "c")).reward == {
            "exact": 0.0,
            "f1": pytest.approx(2 / 3),
            "mixture": pytest.approx(1 / 3),
        }

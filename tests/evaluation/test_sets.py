from __future__ import annotations

import pytest

from rollfeed.config import EvalDatasetSettings, EvalEnvironmentSettings, EvalKeys, EvalSettings
from rollfeed.errors import ConfigError
from rollfeed.evaluation import TrainingDefaults, plan_set


def test_what_nobody_says_is_as_in_training(training: TrainingDefaults) -> None:
    plan = plan_set("set", EvalKeys(), EvalSettings(), training)
    assert plan.params.temperature == 0.8
    assert plan.params.max_new_tokens == 32
    assert plan.params.stop == ("END",)
    assert plan.n_samples_per_prompt == 4
    assert (plan.rm_type, plan.has_own_grader, plan.reward_key) == ("math", False, "score")
    assert (plan.max_context_length, plan.max_prompt_length, plan.num_prompts) == (100, 68, None)
    assert (plan.correct_threshold, plan.apply_chat_template) == (1.0, True)


def test_each_key_comes_from_the_nearest_that_says_it(training: TrainingDefaults) -> None:
    defaults = EvalSettings(temperature=0, top_p=0.5, n_samples_per_prompt=2, rm_type="exact", stop=())
    chosen = EvalDatasetSettings(path="a.jsonl", top_p=0.9, max_response_len=8, rm_type="number")
    plan = plan_set("set", chosen, defaults, training)
    assert (plan.params.temperature, plan.params.top_p, plan.params.max_new_tokens) == (0.0, 0.9, 8)
    assert plan.params.stop == ()
    assert (plan.n_samples_per_prompt, plan.rm_type, plan.has_own_grader) == (2, "number", True)


def test_false_and_zero_are_values_and_not_gaps(training: TrainingDefaults) -> None:
    defaults = EvalSettings(temperature=1.0, min_new_tokens=4, apply_chat_template=True, correct_threshold=0.5)
    chosen = EvalEnvironmentSettings(
        id="a/b", temperature=0.0, min_new_tokens=0, apply_chat_template=False, correct_threshold=0.0
    )
    plan = plan_set("set", chosen, defaults, training)
    assert (plan.params.temperature, plan.params.min_new_tokens) == (0.0, 0)
    assert (plan.apply_chat_template, plan.correct_threshold) == (False, 0.0)


@pytest.mark.parametrize(
    ("of_set", "of_defaults", "expected"),
    [
        ({}, {}, "score"),
        ({}, {"reward_key": "b"}, "b"),
        ({"reward_key": "c"}, {"reward_key": "b"}, "c"),
        ({"reward_key": "c"}, {"reward_key": "b", "eval_reward_key": "d"}, "d"),
        ({"eval_reward_key": "e", "reward_key": "c"}, {"eval_reward_key": "d"}, "e"),
    ],
)
def test_eval_reward_key_goes_before_every_reward_key(
    training: TrainingDefaults, of_set: dict[str, str], of_defaults: dict[str, str], expected: str
) -> None:
    plan = plan_set("set", EvalDatasetSettings(path="a", **of_set), EvalSettings(**of_defaults), training)
    assert plan.reward_key == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_context_len": 101}, "max_context_len = 101: the engine takes 100 tokens"),
        ({"max_response_len": 100}, "leaves 0 of 100 tokens for a prompt"),
        ({"max_prompt_len": 80}, "leaves 68 of 100 tokens for a prompt"),
        ({"min_new_tokens": 33}, "min_new_tokens = 33 is above max_response_len = 32"),
        ({"stop": ("",)}, "an empty string would stop everything"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(
    training: TrainingDefaults, keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"eval set numbers: .*{message}"):
        plan_set("numbers", EvalKeys(**keys), EvalKeys(), training)

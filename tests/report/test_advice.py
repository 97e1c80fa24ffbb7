"""What a run's numbers say of it; every rule is heard once, and silent on what is healthy."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from docs.pages.settings import render_reference

from rollfeed.report import Advice, advice_of

DOCS = Path(__file__).parents[2] / "docs" / "runs.md"
SETTINGS: Mapping[str, Any] = {
    "rollout": {"mode": "async", "n_samples_per_prompt": 4, "max_staleness": 2, "over_sampling_batch_size": None},
    "sampling": {"rollout_max_response_len": 64},
    "prompts": {"environments": [{"id": "core/reverse_text", "level": 3}]},
    "train": {"optimizer": {"learning_rate": 1e-5}, "loss": {"ratio": "token"}},
}
HEALTHY = {
    "rollout/group_reward_std": 0.3,
    "rollout/reward_mean": 0.5,
    "rollout/correct_ratio": 0.5,
    "rollout/truncated_ratio": 0.1,
    "rollout/empty_ratio": 0.0,
    "rollout/response_length_max": 64.0,
    "rollout/staleness_max": 2.0,
    "rollout/groups_stale": 0.0,
    "rollout/groups_submitted": 40.0,
    "rollout/groups_failed": 1.0,
    "rollout/reward_error": 1.0,
    "rollout/reward_timeout": 0.0,
    "rollout/generated_tokens": 1000.0,
    "rollout/wasted_tokens/requeued": 200.0,
    "rollout/dynamic_filter/drop_zero_std_0.0": 10.0,
    "time/train_seconds": 9.0,
    "time/total_seconds": 19.0,
}
TRAINED = {
    "train/entropy": 0.8,
    "train/mismatch_kl": 0.001,
    "train/reference_kl": 0.1,
    "train/clipped_low_ratio": 0.05,
    "train/clipped_high_ratio": 0.1,
}
EVALUATED = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6}


def records(healthy: Mapping[str, Any], num: int, changed: Mapping[str, Any], last: int) -> list[dict[str, Any]]:
    """Return records of so many steps, the last of which are changed."""
    return [{"step": step, **healthy, **(changed if step >= num - last else {})} for step in range(num)]


def evaluations(low: float, high: float, *, num: int = 4) -> list[dict[str, Any]]:
    change = {"since": 0, "accuracy": (low + high) / 2, "low": low, "high": high}
    steps = [25 * number // (num - 1) for number in range(num)]
    return [{"step": each, "sets": {"sums": EVALUATED}, "change": {"sums": change} if each else {}} for each in steps]


def advice(
    settings: Mapping[str, Any] | None = None,
    *,
    metrics: Mapping[str, Any] | None = None,
    trained: Mapping[str, Any] | None = None,
    evaluated: list[dict[str, Any]] | None = None,
    num: int = 25,
    last: int = 5,
) -> tuple[Advice, ...]:
    return advice_of(
        settings={**SETTINGS, **(settings or {})},
        metrics=records(HEALTHY, num, metrics or {}, last),
        trained=records(TRAINED, num, trained or {}, last),
        evaluations=evaluated or [],
    )


SYNC = {**SETTINGS["rollout"], "mode": "sync"}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("failures", "rollout.group_failure", {"metrics": {"rollout/groups_failed": 9.0}}),
    ("reward_errors", "reward.rm_type", {"metrics": {"rollout/reward_error": 9.0}}),
    ("reward_errors", "reward.timeout_seconds", {"metrics": {"rollout/reward_timeout": 9.0}}),
    (
        "reward_errors",
        "plugins.reward",
        {"settings": {"plugins": {"reward": "a:b"}}, "metrics": {"rollout/reward_error": 9.0}},
    ),
    ("equal_groups", "prompts.environments.0.level", {"metrics": {"rollout/group_reward_std": 0.0}, "last": 12}),
    ("equal_dropped", "prompts.environments.0.level", {"metrics": {"rollout/dynamic_filter/drop_zero_std_1.0": 25.0}}),
    ("empty", "model.chat_template", {"metrics": {"rollout/empty_ratio": 0.6}}),
    ("truncated", "sampling.rollout_max_response_len", {"metrics": {"rollout/truncated_ratio": 0.6}}),
    (
        "truncated",
        "engine.context_length",
        {"metrics": {"rollout/truncated_ratio": 0.6, "rollout/response_length_max": 60.0}},
    ),
    (
        "truncated",
        "tools.max_turns",
        {"metrics": {"rollout/truncated_ratio": 0.6, "rollout/response_length_max": 40.0, "rollout/turns_mean": 3.0}},
    ),
    ("accuracy_fell", "train.optimizer.learning_rate", {"evaluated": evaluations(-0.2, -0.1, num=2)}),
    ("accuracy_flat", "train.optimizer.learning_rate", {"evaluated": evaluations(-0.1, 0.1)}),
    ("entropy", "train.loss.clip_high", {"trained": {"train/entropy": 0.02}}),
    ("clipped", "train.optimizer.learning_rate", {"trained": {"train/clipped_high_ratio": 0.4}}),
    ("mismatch", "train.loss.correction", {"trained": {"train/mismatch_kl": 0.2}}),
    ("far_from_reference", "train.loss.kl_coefficient", {"trained": {"train/reference_kl": 4.0}}),
    ("waste", "rollout.mode", {"metrics": {"rollout/wasted_tokens/requeued": 400.0}}),
    (
        "waste",
        "rollout.over_sampling_batch_size",
        {
            "settings": {"rollout": {**SETTINGS["rollout"], "over_sampling_batch_size": 64}},
            "metrics": {"rollout/wasted_tokens/requeued": 400.0},
        },
    ),
    ("waste", "filters.over_sampling.num_extra", {"metrics": {"rollout/wasted_tokens/over_sampled": 400.0}}),
    (
        "never_drawn",
        "prompts.datasets.0.weight",
        {
            "settings": {"prompts": {**SETTINGS["prompts"], "datasets": [{"path": "a/sums.csv"}]}},
            "metrics": {"sources/core/reverse_text@3/groups": 8.0},
        },
    ),
    ("stale", "rollout.max_staleness", {"metrics": {"rollout/groups_stale": 2.0}}),
    ("idle_engine", "rollout.mode", {"settings": {"rollout": SYNC, "engine": {"sglang": {"workers": ["http://a"]}}}}),
]


@pytest.mark.parametrize(("name", "setting", "case"), CASES, ids=[f"{name}-{setting}" for name, setting, _ in CASES])
def test_a_run_in_trouble_is_told_the_setting_that_changes_it(name: str, setting: str, case: dict[str, Any]) -> None:
    (found,) = advice(**case)
    assert (found.name, found.setting) == (name, setting)
    assert f": {setting}" in found.text
    assert "\n" not in found.text


def test_settings_that_are_named_exist_and_the_page_has_them() -> None:
    reference, page = render_reference(), DOCS.read_text(encoding="utf-8")
    for name, setting, case in CASES:
        (found,) = advice(**case)
        assert f"`{re.sub(r'[.][0-9]+[.]', '.', found.setting)}`" in reference
        assert f"| `{name}` |" in page, f"docs/runs.md has no row for {name}"
        assert setting.split(".0.")[-1] in page


def test_healthy_runs_are_told_nothing() -> None:
    assert advice(evaluated=evaluations(0.1, 0.3)) == ()
    assert advice_of(settings={}, metrics=[]) == ()


def test_the_line_has_the_steps_the_number_and_what_the_setting_is_now() -> None:
    (found,) = advice(metrics={"rollout/truncated_ratio": 0.75}, last=3)
    assert found.text == (
        "75% of answers cut off for 3 steps (22 to 24): raise the limit, or ask for shorter answers: "
        "sampling.rollout_max_response_len (now 64)"
    )
    assert (found.first_step, found.last_step) == (22, 24)


@pytest.mark.parametrize(
    ("right", "reward", "words"),
    [
        (0.0, 1.0, "too hard,"),
        (1.0, 0.0, "too easy;"),
        (None, 0.0, "too hard,"),
        (None, 1.0, "too easy;"),
        (None, 0.5, "too easy or too hard"),
    ],
)
def test_equal_groups_are_told_as_too_hard_or_too_easy(right: float | None, reward: float, words: str) -> None:
    changed = {"rollout/group_reward_std": 0.0, "rollout/correct_ratio": right, "rollout/reward_mean": reward}
    (found,) = advice(metrics=changed, last=12)
    assert "all groups equal for 12 steps (13 to 24)" in found.text
    assert f"prompts are {words}" in found.text


def test_reasons_of_filters_of_ones_own_are_no_rewards() -> None:
    assert advice(metrics={"rollout/dynamic_filter/drop_zero_std_of_lengths": 40.0}) == ()


def test_what_has_passed_is_not_told() -> None:
    metrics = [*records(HEALTHY, 20, {"rollout/truncated_ratio": 1.0}, 10), {"step": 20, **HEALTHY}]
    assert advice_of(settings=SETTINGS, metrics=metrics) == ()
    assert advice(metrics={"rollout/truncated_ratio": 1.0}, last=2) == ()


def test_numbers_that_are_missing_or_not_finite_are_no_reason() -> None:
    nothing = dict.fromkeys(HEALTHY) | {"rollout/reward_mean": math.nan, "time/total_seconds": math.inf}
    assert advice(metrics=nothing, trained=dict.fromkeys(TRAINED), last=25) == ()


@pytest.mark.parametrize(
    "changed",
    [
        {"rollout": {**SETTINGS["rollout"], "n_samples_per_prompt": 1}},
        {"rollout": {**SETTINGS["rollout"], "mode": "sft"}},
        {"advantage": {"estimator": "reinforce_pp"}},
    ],
)
def test_equal_groups_are_as_they_should_be_where_none_is_compared(changed: Mapping[str, Any]) -> None:
    assert advice(changed, metrics={"rollout/group_reward_std": 0.0}) == ()


def test_answers_that_are_short_on_purpose_are_not_told() -> None:
    assert advice(metrics={"rollout/truncated_ratio": 1.0, "rollout/response_length_max": 31.0}) == ()


@pytest.mark.parametrize(
    ("dataset", "drawn"),
    [
        ({"path": "sums.csv"}, {"sources/sums/groups": 1.0}),
        ({"path": "sums.csv"}, {"sources/of_another_name/groups": 1.0}),
        ({"path": "sums.csv", "weight": 0.01}, {}),
    ],
)
def test_sources_that_are_drawn_or_rare_or_unknown_are_not_told(dataset, drawn) -> None:
    settings = {"prompts": {**SETTINGS["prompts"], "datasets": [dataset]}}
    assert advice(settings, metrics={"sources/core/reverse_text@3/groups": 8.0, **drawn}) == ()


def test_waste_that_deterministic_runs_cost_is_not_told() -> None:
    settings = {"rollout": {**SETTINGS["rollout"], "deterministic": True}}
    assert advice(settings, metrics={"rollout/wasted_tokens/requeued": 400.0}) == ()


def test_an_accuracy_that_rose_on_one_set_is_not_flat() -> None:
    found = evaluations(-0.1, 0.1)
    for each in found[1:]:
        each["sets"]["words"] = EVALUATED
        each["change"]["words"] = {"since": 0, "accuracy": 0.2, "low": 0.1, "high": 0.3}
    assert advice(evaluated=found) == ()
    assert advice(evaluated=evaluations(-0.1, 0.1, num=3)) == ()


def test_an_accuracy_of_few_prompts_that_rose_is_not_flat() -> None:
    assert advice(evaluated=evaluations(-0.15, 0.63)) == ()

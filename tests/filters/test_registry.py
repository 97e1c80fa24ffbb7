from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.filters import RewardStd, build_filter, compose, filter_parameters
from rollfeed.filters.registry import FILTERS
from rollfeed.types import Drop, Keep

REQUIRED = {"minimum_reward": {"minimum": 0.5}, "quality_and_diversity": {"minimum_reward": 0.5}}
DOCUMENT = Path(__file__).parents[2] / "docs" / "filters.md"


@pytest.mark.parametrize("name", sorted(FILTERS))
def test_every_filter_can_be_built_by_name(name, scored) -> None:
    group_filter = build_filter(name, REQUIRED.get(name, {}), n_samples_per_prompt=2, reward_key=None)
    group_filter(scored([0.0, 1.0]))


def test_parameters_size_and_reward_key_reach_the_filter() -> None:
    rule = build_filter("reward_std", {"tolerance": 1}, n_samples_per_prompt=3, reward_key="score")
    assert rule == RewardStd(n_samples_per_prompt=3, reward_key="score", tolerance=1)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("reward_sdt", {}, "filter 'reward_sdt': unknown filter; did you mean reward_std?"),
        ("zzzz", {}, "filter 'zzzz': unknown filter; known here: all_correct, all_wrong"),
        ("reward_std", {"tolerence": 1.0}, "filter reward_std: tolerence: unknown parameter; did you mean tolerance"),
        ("complete_group", {"threshold": 1.0}, "filter complete_group: threshold: unknown parameter; known here: none"),
        ("reward_std", {"reward_key": "x"}, "filter reward_std: reward_key: unknown parameter"),
        ("reward_std", {"tolerance": "1"}, "filter reward_std: tolerance = '1': must be a number"),
        ("reward_std", {"tolerance": True}, "filter reward_std: tolerance = True: must be a number"),
        ("reward_std", {"tolerance": None}, "filter reward_std: tolerance = None: must be a number"),
        ("reward_std", {"keep_when_short": 1}, "filter reward_std: keep_when_short = 1: must be true or false"),
        ("response_length", {"minimum": 1.0}, "filter response_length: minimum = 1.0: must be a whole number"),
        ("response_length", {"minimum": -1}, "filter response_length: minimum = -1: must be at least 0"),
        (
            "response_length",
            {"minimum": 5, "maximum": 4},
            "filter response_length: maximum = 4: must be at least",
        ),
        ("truncated_fraction", {"maximum": 1.5}, "filter truncated_fraction: maximum = 1.5: must be between 0 and 1"),
        ("response_diversity", {"minimum": 0.0}, "filter response_diversity: minimum = 0.0: must be above 0"),
        ("all_wrong", {"threshold": float("inf")}, "filter all_wrong: threshold = inf: must be a finite number"),
        ("minimum_reward", {}, "filter minimum_reward: minimum is missing: it has no default, set it"),
    ],
)
def test_a_wrong_filter_setting_is_refused_in_one_line(name, parameters, message) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}") as caught:
        build_filter(name, parameters, n_samples_per_prompt=2, reward_key=None)
    assert "\n" not in str(caught.value)


def test_an_optional_bound_may_be_none() -> None:
    build_filter("response_length", {"maximum": None}, n_samples_per_prompt=2, reward_key=None)


def documented_default(default: object) -> str:
    if default is ...:
        return "(required)"
    return {"True": "= true", "False": "= false", "None": "= none"}.get(str(default), f"= {default}")


def test_the_document_lists_exactly_the_filters_and_their_parameters() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\|(.*)\|$", DOCUMENT.read_text(), re.MULTILINE)
    expected = {
        name: ", ".join(f"`{key}` {documented_default(value)}" for key, value in filter_parameters(name).items())
        for name in FILTERS
    }
    assert {name: parameters.strip() for name, parameters in rows} == expected


def test_a_drop_is_false_and_a_keep_is_true() -> None:
    assert not Drop("low_reward")
    assert not Drop("zero_std_0.0", usable=True)
    assert Keep()


def test_compose_of_nothing_keeps_everything() -> None:
    assert compose([])([]) == Keep()


def test_compose_returns_the_first_drop() -> None:
    rules = [lambda samples: Keep(), lambda samples: Drop("a"), lambda samples: Drop("b")]
    assert compose(rules)([]) == Drop("a")


def test_compose_prefers_a_final_drop_to_a_usable_one() -> None:
    usable, final = Drop("a", usable=True), Drop("b")
    assert compose([lambda samples: usable, lambda samples: Keep(), lambda samples: final])([]) == final
    assert compose([lambda samples: usable, lambda samples: Drop("c", usable=True)])([]) == usable


def test_compose_refuses_a_filter_that_returns_a_bool() -> None:
    def keeps(samples: object) -> bool:
        return True

    with pytest.raises(
        RunFailedError, match=r"plugins.group_filters \(.*keeps\) returned True; return Keep.*test_registry.py:"
    ):
        compose([keeps])([])

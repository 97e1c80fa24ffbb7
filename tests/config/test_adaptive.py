from __future__ import annotations

from typing import Any

import pytest

from rollfeed.config import validate_settings
from rollfeed.errors import ConfigError

ENVIRONMENT = "core/copy_text"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"environment_list": []}, "at least 1 item"),
        ({"environment_list": [ENVIRONMENT, ENVIRONMENT]}, "'core/copy_text' twice: remove one"),
        ({"policy": "harder"}, "'band', 'rlve', 'learning_progress' or 'fixed'"),
        ({"parameters": {"core/other": {}}}, "parameters.'core/other': not in environment_list"),
        ({"min_metric_to_increase_difficulty": 0.5}, "is of policy = 'rlve', and policy is 'band'"),
        ({"difficulty_sliding_window_size": 0}, "greater than or equal to 1"),
        ({"initial_difficulty": -1}, "greater than or equal to 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        validate_settings({"prompts": {"adaptive": {"environment_list": [ENVIRONMENT], **changed}}}, where="x")


def test_an_environment_is_at_a_fixed_level_or_adapts() -> None:
    prompts = {"environments": [{"id": ENVIRONMENT}], "adaptive": {"environment_list": [ENVIRONMENT]}}
    with pytest.raises(ConfigError, match=r"is in adaptive\.environment_list and in environments"):
        validate_settings({"prompts": prompts}, where="x")


def test_a_policy_of_ones_own_needs_environments_that_adapt() -> None:
    tree = {"prompts": {"environments": [{"id": ENVIRONMENT}]}, "plugins": {"difficulty_policy": "module:Policy"}}
    with pytest.raises(ConfigError, match=r"difficulty_policy: .*: add \[prompts.adaptive\]"):
        validate_settings(tree, where="x")

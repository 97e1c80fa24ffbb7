from __future__ import annotations

from typing import Any

import pytest

from rollfeed.config import Settings, validate_settings
from rollfeed.errors import ConfigError


def settings_with(**evaluation: Any) -> Settings:
    return validate_settings({"eval": evaluation}, where="test")


def test_a_file_with_eval_sets_alone_is_enough() -> None:
    assert settings_with(environments=[{"id": "core/add_numbers"}]).eval.has_sets
    with pytest.raises(ConfigError, match="no prompts"):
        settings_with(temperature=0)


def test_what_is_measured_does_not_decide_what_a_run_is() -> None:
    first = settings_with(environments=[{"id": "core/add_numbers"}])
    second = settings_with(environments=[{"id": "core/copy_text"}], seed=4)
    assert first.identity() == second.identity()
    assert not [key for key in first.identity() if key.startswith("eval")]


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"environments": [{"id": "a/b"}, {"id": "a/b"}]}, "set 'a/b@0' is listed twice"),
        ({"datasets": [{"path": "x", "name": "y"}, {"path": "y"}]}, "set 'y' is listed twice"),
        ({"datasets": [{"path": "x", "top_k": 0}]}, "eval.datasets.0.top_k: 0 keeps no token"),
        ({"datasets": [{"path": "x", "temprature": 0}]}, "eval.datasets.0.temprature: .*did you mean temperature"),
        ({"environments": [{"id": "a/b", "label_key": "x"}]}, "eval.environments.0.label_key: unknown setting"),
        ({"temperature": -1}, "eval.temperature = -1"),
    ],
)
def test_mistakes_are_named(evaluation: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_with(**evaluation)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollfeed.app.scoring.reward_models import RunRewardModel, learned_problems
from rollfeed.config import RewardSettings
from rollfeed.errors import ConfigError
from rollfeed.rewards.labels import NO_LABEL


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rm_type": "reward_model"}, "set reward.model.checkpoint"),
        ({"mixture": [{"rm_type": "reward_model"}]}, "set reward.model.checkpoint"),
        ({"model": {"checkpoint": "/nowhere/at/all"}}, "no such folder"),
    ],
)
def test_a_model_that_is_not_there_is_refused_before_a_run(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        RunRewardModel(RewardSettings(**settings)).prepare(None)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    with pytest.raises(ConfigError, match="no tokenizer"):
        RunRewardModel(RewardSettings(model={"checkpoint": str(tmp_path)})).prepare(None)


def test_a_row_is_refused_that_a_part_of_the_mixture_cannot_score() -> None:
    settings = RewardSettings(mixture=[{"rm_type": "boxed_exact"}, {"rm_type": "reward_model"}])
    problems = learned_problems(settings, {"exact": lambda label, metadata: None if label else NO_LABEL})
    assert problems["mixture"](None, {}) == NO_LABEL
    assert problems["mixture"]("4", {}) == "part 'reward_model': no model: set reward.model.checkpoint"

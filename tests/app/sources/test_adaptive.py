"""`[prompts.adaptive]` from settings to prompts, and its state through a run directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollfeed.app.sources import build_source
from rollfeed.config import validate_settings
from rollfeed.errors import ConfigError, PluginError
from rollfeed.protocols import DifficultyPolicy, LevelOutcome, PromptSource
from rollfeed.testing import CharTokenizer

LIST = ["core/copy_text", "core/compare_max"]


class Highest(DifficultyPolicy):
    """A policy as a user would write it: only the hardest level there is."""

    def __init__(self, level: int, window_size: int) -> None:
        self.level = level + window_size

    def weights(self) -> Mapping[int, float]:
        return {self.level: 1.0}

    def observe(self, outcome: LevelOutcome) -> None:
        self.level += outcome.num_correct

    def end_step(self, *, max_level: int | None) -> float | None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.level = state["level"]


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., PromptSource]:
    def build(*, plugins: Any = None, prompts: Any = None, **adaptive: Any) -> PromptSource:
        tree = {
            "prompts": {
                "adaptive": {"environment_list": LIST, "apply_chat_template": False, **adaptive},
                **(prompts or {}),
            },
            "engine": {"context_length": 4096},
            "plugins": plugins or {},
        }
        return build_source(validate_settings(tree, where="test"), CharTokenizer(), folders=[tmp_path])

    return build


async def test_problems_come_from_all_environments_at_the_levels_of_the_window(build: Any) -> None:
    prompts = await build(initial_difficulty=2, difficulty_sliding_window_size=2).draw(60)
    assert {(prompt.metadata["environment"], prompt.metadata["level"]) for prompt in prompts} == {
        (name, level) for name in LIST for level in (1, 2)
    }


async def test_they_are_mixed_with_other_sources_by_weight(build: Any) -> None:
    others = {"environments": [{"id": "core/add_numbers", "apply_chat_template": False}]}
    prompts = await build(prompts=others, weight=3.0).draw(400)
    share = sum(prompt.source == "adaptive" for prompt in prompts) / 400
    assert 0.65 < share < 0.85


async def test_a_policy_of_ones_own_chooses(build: Any) -> None:
    prompts = await build(plugins={"difficulty_policy": Highest}).draw(10)
    assert {prompt.metadata["level"] for prompt in prompts} == {4}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"environment_list": ["core/coppy_text"]}, r"core/coppy_text.*core/copy_text"),
        ({"initial_difficulty": 1000}, r"core/copy_text: level = 1000: its levels are 0 to"),
        ({"parameters": {"core/copy_text": {"words": 3}}}, r"core/copy_text: has no parameters"),
        ({"plugins": {"difficulty_policy": "nowhere.py:Policy"}}, r"plugins.difficulty_policy"),
    ],
)
def test_what_is_not_there_is_refused_before_a_run(build: Any, changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build(**changed)


def test_a_policy_without_a_level_is_refused(build: Any) -> None:
    class Levelless(Highest):
        def __init__(self, level: int, window_size: int) -> None:
            pass

    with pytest.raises(PluginError, match=r"difficulty_policy = .*Levelless'?: what it makes has no level"):
        build(plugins={"difficulty_policy": Levelless})

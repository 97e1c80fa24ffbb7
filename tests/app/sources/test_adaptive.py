"""`[prompts.adaptive]` from settings to prompts, and its state through a run directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollfeed.app.sources import build_source
from rollfeed.config import Settings, validate_settings
from rollfeed.environments.registry import named_by_path
from rollfeed.errors import ConfigError, PluginError
from rollfeed.prompts import MixtureSource
from rollfeed.protocols import DifficultyPolicy, LevelOutcome, PromptSource
from rollfeed.testing import CharTokenizer, group_of, make_sample
from rollfeed.types import Verdict
from rollfeed.workers import WorkerPool

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


OWN_ENVIRONMENT = """
from rollfeed.types import Verdict


class {name}:
    environment_id, version, summary, max_level = "my/{name}", 1, "say a number", None

    def make(self, level, random):
        if random.random() < 0.05:
            raise ValueError("not this one")
        number = random.randrange(10 ** (level + 3))
        return f"Say {{number}}", {{"number": number}}, str(number)

    def verify(self, params, response):
        return Verdict.graded(response == str(params["number"]))
"""


async def drawn(settings: Settings, folder: Path, *, num_workers: int, stop_at: int | None = None) -> list[str]:
    """Draw 1,000 problems in steps of 40 and answer levels up to 2 right; perhaps with another process on the way."""
    ids, state, begin = [], None, 0
    for end in filter(None, (stop_at, 25)):
        async with WorkerPool(num_workers=num_workers) as workers:
            source = build_source(settings, CharTokenizer(), folders=[folder], workers=workers)
            assert isinstance(source, MixtureSource)
            if state is not None:
                source.load_state_dict(json.loads(json.dumps(state)))
            async with source:
                for _ in range(begin, end):
                    prompts = [prompt for size in (7, 1, 32) for prompt in await source.draw(size)]
                    ids += [prompt.prompt_id for prompt in prompts]
                    for prompt in prompts:
                        is_right = prompt.metadata["level"] <= 2
                        group = group_of([make_sample(reward=float(is_right), prompt=prompt)], prompt=prompt)
                        rollouts = (group.rollouts[0].with_reward(Verdict.graded(is_right)),)
                        source.learn(replace(group, rollouts=rollouts))
                    source.end_step()
                    state = source.state_dict()
                await source.draw(5)  # which nobody has committed
        begin = end
    return ids


async def test_a_thousand_tasks_are_the_same_with_any_number_of_workers_and_after_a_stop(tmp_path: Path) -> None:
    for name in ("First", "Second"):
        (tmp_path / f"{name.lower()}.py").write_text(OWN_ENVIRONMENT.format(name=name))
    adaptive = {
        "environment_list": ["first.py:First", "second.py:Second", "core/copy_text"],
        "apply_chat_template": False,
    }
    settings = validate_settings({"prompts": {"adaptive": adaptive}}, where="test")
    try:
        first = await drawn(settings, tmp_path, num_workers=1)
        assert len(first) == 1000
        assert {prompt_id.partition("/train")[0] for prompt_id in first} >= {"my/First@3", "my/Second@0"}
        assert await drawn(settings, tmp_path, num_workers=4, stop_at=13) == first
    finally:
        named_by_path.clear()

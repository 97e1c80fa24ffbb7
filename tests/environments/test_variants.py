from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollfeed.environments import EnvironmentSource, make_task, with_parameters
from rollfeed.environments.builtin import AddNumbers, ReverseText
from rollfeed.errors import ConfigError
from rollfeed.protocols import PromptRenderer


def test_an_environment_without_parameters_takes_none() -> None:
    environment = AddNumbers()
    assert with_parameters(environment, {}) is environment
    with pytest.raises(ConfigError, match="core/add_numbers: has no parameters, so digits, terms cannot be set"):
        with_parameters(environment, {"terms": 2, "digits": 3})


def test_parameters_hold_in_every_split() -> None:
    environment = with_parameters(ReverseText(), {"style": "compact", "alphabet_size": 3})
    for split in ("train", "eval"):
        task = make_task(environment, level=6, index=0, run_seed=0, split=split)
        assert task.question.startswith("rev:")
        assert set(task.params["text"]) <= set("abc")


def test_an_environment_without_splits_has_other_seeds_for_each() -> None:
    seeds = {make_task(AddNumbers(), level=0, index=0, run_seed=0, split=split).seed for split in ("train", "eval")}
    assert len(seeds) == 2


async def test_source_of_a_split_draws_from_its_words_only(make_renderer: Callable[..., PromptRenderer]) -> None:
    environment = ReverseText(style="compact")
    words: dict[str, set[Any]] = {}
    for split in ("train", "eval"):
        source = EnvironmentSource(
            environment, level=1, seed=5, renderer=make_renderer(), split=split, apply_chat_template=False
        )
        prompts = await source.draw(100)
        assert all(prompt.text.startswith("rev:") for prompt in prompts)
        words[split] = {prompt.metadata["params"]["text"] for prompt in prompts}
    assert not words["train"] & words["eval"]


def test_take_returns_what_draw_does(make_renderer: Callable[..., PromptRenderer]) -> None:
    first, second = (EnvironmentSource(AddNumbers(), level=2, seed=5, renderer=make_renderer()) for _ in range(2))
    taken = first.take(3) + first.take(2)
    assert [prompt.prompt_id for prompt in taken] == [prompt.prompt_id for prompt in second.take(5)]

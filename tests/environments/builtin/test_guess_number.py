from __future__ import annotations

from random import Random
from typing import Any

import pytest

from rollfeed.base.waiting import without_waiting
from rollfeed.environments import EnvironmentSource, make_task
from rollfeed.environments.builtin.guess_number import GuessNumber
from rollfeed.errors import ConfigError
from rollfeed.prompts import ChatRenderer
from rollfeed.protocols import MULTI_TURN, EnvironmentStep
from rollfeed.testing import CharTokenizer
from rollfeed.types import Correct


def play(environment: GuessNumber, params: dict[str, Any], guesses: list[str]) -> list[EnvironmentStep]:
    state, steps = environment.start(params), []
    for guess in guesses:
        steps.append(environment.step(state, guess))
        state = steps[-1].state
    return steps


@pytest.mark.parametrize(("style", "words"), [("chat", ("Higher.", "Lower.")), ("compact", (">", "<"))])
def test_halving_finds_every_number_of_every_level(style: str, words: tuple[str, str]) -> None:
    environment = GuessNumber(style=style)
    for level in (0, 1, 3, 6):
        numbers = set()
        for index in range(60):
            task = make_task(environment, level=level, index=index, run_seed=2)
            numbers.add(task.params["number"])
            low, high, state, told = 1, 4 << level, environment.start(task.params), ""
            for num_guesses in range(level + 3):
                guess = (low + high) // 2
                step = environment.step(state, f"<answer>{guess}</answer>")
                if step.verdict is not None:
                    assert (step.verdict.reward, step.verdict.correct) == (1 - num_guesses / (level + 3), Correct.YES)
                    break
                ((told),) = [message["content"] for message in step.messages]
                assert told in words
                low, high = (guess + 1, high) if told == words[0] else (low, guess - 1)
                state = step.state
            else:
                pytest.fail(f"{task.params} is not found")
        assert min(numbers) >= 1
        assert max(numbers) <= 4 << level


def test_what_is_no_number_costs_a_guess_and_after_the_last_nothing_is_earned() -> None:
    params = {"number": 3, "max_turns": 3, "style": "compact"}
    *told, last = play(GuessNumber(), params, ["four", "1", "4"])
    assert [step.messages[0]["content"] for step in told] == ["?", ">"]
    assert last.verdict is not None
    assert (last.verdict.reward, last.verdict.correct, last.messages) == (0.0, Correct.NO, ())


def test_problems_are_told_apart_by_what_they_hide_and_every_number_comes_in_training() -> None:
    renderer = ChatRenderer(CharTokenizer(), rollout_max_prompt_len=None)

    def numbers(split: str) -> set[int]:
        source = EnvironmentSource(GuessNumber(), level=2, seed=0, renderer=renderer, split=split)
        prompts = without_waiting(source.draw_different(100))
        assert all(prompt.metadata[MULTI_TURN] for prompt in prompts)
        return {prompt.metadata["params"]["number"] for prompt in prompts}

    assert numbers("train") == numbers("eval") == set(range(1, 17))


def test_other_styles_and_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="style = 'loud': must be chat or compact"):
        GuessNumber(style="loud")
    with pytest.raises(ConfigError, match=r"parameters\.range: there is only style"):
        GuessNumber().with_parameters({"range": 3})
    assert GuessNumber().with_parameters({"style": "compact"}).make(0, Random(0))[0] == "1-4?"


def test_a_step_says_something_or_ends() -> None:
    with pytest.raises(ValueError, match="messages, or a verdict"):
        EnvironmentStep()

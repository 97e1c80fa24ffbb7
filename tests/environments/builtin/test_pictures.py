"""Problems with pictures: what is drawn is what is asked about, and nobody stores it twice."""

from __future__ import annotations

import base64
import io
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from rollfeed.base.waiting import without_waiting
from rollfeed.environments import EnvironmentSource, make_task
from rollfeed.environments.builtin.count_dots import CountDots
from rollfeed.environments.builtin.drawing import data_uri
from rollfeed.environments.builtin.name_colour import NameColour
from rollfeed.errors import ConfigError
from rollfeed.protocols import Task
from rollfeed.types import Correct


def pixels_of(task: Task) -> NDArray[np.int64]:
    (uri,) = task.pictures
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))), np.int64)


def num_blobs(is_light_HW: NDArray[np.bool_]) -> int:
    """Count connected areas by colouring them one after the other."""
    left, found = is_light_HW.copy(), 0
    while left.any():
        found += 1
        row, column = np.argwhere(left)[0]
        edge = [(int(row), int(column))]
        while edge:
            row, column = edge.pop()
            if 0 <= row < len(left) and 0 <= column < len(left) and left[row, column]:
                left[row, column] = False
                edge += [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
    return found


@pytest.mark.parametrize("level", [0, 3, 13])
def test_as_many_dots_are_drawn_as_are_asked_about(level: int) -> None:
    for index in range(20):
        task = make_task(CountDots(), level=level, index=index, run_seed=0)
        is_light_HW = pixels_of(task).mean(axis=2) > 128
        assert is_light_HW.sum() == 16 * task.params["answer"]  # none lies on another
        assert num_blobs(is_light_HW) <= task.params["answer"]  # neighbours may touch
    assert 1 <= task.params["answer"] <= 3 + level


@pytest.mark.parametrize("level", [0, 5, 11])
def test_the_colour_that_is_drawn_is_the_answer(level: int) -> None:
    by_colour: dict[str, list[Any]] = {}
    for index in range(60):
        task = make_task(NameColour(), level=level, index=index, run_seed=0)
        pixels_HWC = pixels_of(task)
        spread = np.abs(pixels_HWC - 128).sum(axis=2)
        by_colour.setdefault(str(task.answer), []).append(pixels_HWC[spread > spread.max() * 0.6].mean(axis=0))
    assert len(by_colour) == min(3 + level, 8)
    means = {colour: np.mean(each, axis=0) for colour, each in by_colour.items()}
    for colour, each in by_colour.items():
        for mean in each:
            assert min(means, key=lambda other: float(np.abs(means[other] - mean).sum())) == colour


def test_pixels_come_back_from_a_data_uri() -> None:
    pixels_HWC = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)
    content = base64.b64decode(data_uri(pixels_HWC).partition(",")[2])
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(content))), pixels_HWC)


@pytest.mark.parametrize(
    ("style", "response", "expected"),
    [
        ("chat", "It is red.\nThe answer is: red", Correct.YES),
        ("chat", "red or blue", Correct.NO),
        ("chat", "blue", Correct.NO),
        ("compact", "red", Correct.YES),
        ("compact", "redred", Correct.NO),
        ("compact", "red blue", Correct.NO),
    ],
)
def test_one_colour_is_an_answer(style: str, response: str, expected: Correct) -> None:
    assert NameColour(style=style).verify({"colour": "red", "style": style}, response).correct is expected


def test_pictures_are_in_the_prompt_and_not_in_what_is_stored_of_the_problem(make_renderer: Any) -> None:
    source = EnvironmentSource(NameColour(style="compact"), level=0, seed=0, renderer=make_renderer())
    prompts = without_waiting(source.draw(40))
    assert all(len(prompt.images) == 1 and set(prompt.metadata["params"]) == {"colour", "style"} for prompt in prompts)
    assert len({prompt.images[0].content_hash for prompt in prompts}) == 40
    assert min(Counter(prompt.label for prompt in prompts).values()) > 3
    assert {prompt.text.partition("?")[0] for prompt in prompts} == {"<user><image>"}


def test_a_renderer_without_pictures_is_told(make_renderer: Any) -> None:
    renderer = make_renderer()
    renderer.loader = None
    with pytest.raises(ConfigError, match=r"environment core/count_dots@0: its problems have pictures"):
        EnvironmentSource(CountDots(), level=0, seed=0, renderer=renderer)


def test_what_is_called_pictures_and_is_none_stays() -> None:
    class Gallery(CountDots):
        def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
            return "How many?", {"pictures": ["Mona Lisa"]}, "1"

    task = make_task(Gallery(), level=0, index=0, run_seed=0)
    assert (task.params, task.pictures) == ({"pictures": ["Mona Lisa"]}, ())

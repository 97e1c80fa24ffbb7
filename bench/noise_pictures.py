"""Environments without their pictures: noise in their place, of which nothing can be learned but the words."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from rollfeed.environments.builtin.count_dots import CountDots
from rollfeed.environments.builtin.drawing import SIDE, data_uri
from rollfeed.environments.builtin.name_colour import NameColour


class NoiseColour(NameColour):
    """Asks for a colour that is not shown."""

    environment_id = "bench/noise_colour"

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        return _with_noise(*super().make(level, random), random)


class NoiseDots(CountDots):
    """Asks for the number of dots that are not shown."""

    environment_id = "bench/noise_dots"

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        return _with_noise(*super().make(level, random), random)


def _with_noise(
    question: str, params: dict[str, Any], answer: str | None, random: Random
) -> tuple[str, dict[str, Any], str | None]:
    noise = np.random.default_rng(random.getrandbits(64)).integers(0, 256, (SIDE, SIDE, 3))
    return question, {**params, "pictures": [data_uri(noise.astype(np.uint8))]}, answer

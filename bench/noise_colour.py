"""``core/name_colour`` without its pictures: noise in their place, of which nothing can be learned but the words."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from rollfeed.environments.builtin.drawing import SIDE, data_uri
from rollfeed.environments.builtin.name_colour import NameColour


class NoiseColour(NameColour):
    """Asks for a colour that is not shown."""

    environment_id = "bench/noise_colour"

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        question, params, answer = super().make(level, random)
        noise = np.random.default_rng(random.getrandbits(64)).integers(0, 256, (SIDE, SIDE, 3))
        return question, {**params, "pictures": [data_uri(noise.astype(np.uint8))]}, answer

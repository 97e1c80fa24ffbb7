"""``core/name_colour``: the colour of a picture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import Any

from rollfeed.environments.builtin.drawing import SIDE, data_uri, noisy
from rollfeed.environments.builtin.scoring import graded, no_answer
from rollfeed.environments.builtin.styled import Drawn, StyledQuestion
from rollfeed.types import Verdict

_COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "blue": (40, 40, 220),
    "green": (40, 180, 40),
    "yellow": (220, 210, 40),
    "black": (30, 30, 30),
    "white": (225, 225, 225),
    "purple": (130, 40, 160),
    "orange": (235, 130, 20),
}
_GREY = (128, 128, 128)
_NOISE = 20


class NameColour(StyledQuestion):
    """Name a colour; a level more is another colour to choose from, and from level 6 on a smaller square of it."""

    environment_id: str = "core/name_colour"
    version: int = 1
    summary: str = "name the colour of a picture; levels add colours, then make what has it smaller"
    max_level: int | None = 11
    instruction = "Answer with one word."

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the chance of any one colour."""
        return 0.0, 1 / len(_colours(level))

    def _draw(self, level: int, random: Random) -> Drawn:
        colours = _colours(level)
        colour = random.choice(colours)
        side = SIDE - 4 * max(0, level - 5)
        row, column = random.randint(0, SIDE - side), random.randint(0, SIDE - side)
        pixels_HWC = noisy(_GREY, random, amount=_NOISE)
        coloured_HWC = noisy(_COLOURS[colour], random, amount=_NOISE)
        square = (slice(row, row + side), slice(column, column + side))
        pixels_HWC[square] = coloured_HWC[square]
        names = f"{', '.join(colours[:-1])} or {colours[-1]}"
        return Drawn(
            chat=f"<image>\nWhich colour is the square in the picture: {names}?",
            compact="<image>?",
            params={"colour": colour},
            answer=colour,
            pictures=(data_uri(pixels_HWC),),
        )

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Compare the only colour that the answer names."""
        written = self._written(params, response.rpartition(self.instruction)[2])
        found = {word for word in re.findall("[a-z]+", written.casefold()) if word in _COLOURS}
        if params["style"] == "compact":
            found &= {written}
        if len(found) != 1:
            return no_answer("one colour")
        (named,) = found
        return graded(named, is_right=named == params["colour"], partial=0.0)


def _colours(level: int) -> tuple[str, ...]:
    return tuple(_COLOURS)[: 3 + min(level, 5)]

"""``core/count_dots``: how many dots a picture has."""

from __future__ import annotations

from random import Random

from rollfeed.environments.builtin.drawing import SIDE, data_uri, noisy
from rollfeed.environments.builtin.styled import Drawn, StyledNumber

_DARK, _LIGHT = (40, 40, 40), (225, 225, 225)
_NOISE = 20
_CELL = 8
"""Pixels of a square of the picture on each side; a square has one dot or none."""
_DOT = 4


class CountDots(StyledNumber):
    """Count light dots on a dark picture; a level more is a dot more at most."""

    environment_id: str = "core/count_dots"
    version: int = 1
    summary: str = "count the dots of a picture; levels add dots"
    max_level: int | None = 13

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the chance of any one count."""
        return 0.0, 1 / (3 + level)

    def _draw(self, level: int, random: Random) -> Drawn:
        """Draw 1 to ``3 + level`` dots, each somewhere in a square of its own."""
        count, per_side = random.randint(1, 3 + level), SIDE // _CELL
        pixels_HWC = noisy(_DARK, random, amount=_NOISE)
        dot_HWC = noisy(_LIGHT, random, amount=_NOISE)[:_DOT, :_DOT]
        for square in random.sample(range(per_side**2), count):
            row = square // per_side * _CELL + random.randint(0, _CELL - _DOT)
            column = square % per_side * _CELL + random.randint(0, _CELL - _DOT)
            pixels_HWC[row : row + _DOT, column : column + _DOT] = dot_HWC
        return Drawn(
            chat="<image>\nHow many light dots are in the picture?",
            compact="<image>#",
            params={"answer": count},
            answer=str(count),
            pictures=(data_uri(pixels_HWC),),
        )

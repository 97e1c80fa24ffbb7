"""Common short English words that environments build problems from."""

from __future__ import annotations

_TEXT = """
    apple ball bear bell bird boat book bottle box bread bridge brother bus butter cake camera candle car castle cat
    chair cheese child church city cloud coat coffee corn cow cup desk dog door dress duck ear egg eye farm father
    field fire fish flag floor flower forest fox friend garden gate glass gold grass hand hat heart hill horse house
    ice island key king kitchen knife lake lamp leaf letter light lion milk mirror money moon morning mother mountain
    mouse music nest night ocean orange paper pencil phone piano picture pig pillow plate pocket potato queen rabbit
    rain ring river road rock roof rope rose sand school sea sheep ship shirt shoe silver sister snow soap sock song
    soup spoon spring star stone street sugar summer sun table tail tea tiger tower town train tree truck valley
    village wall water wheel wind window winter wolf wood yard year
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())

"""``core/close_brackets``: the closing brackets that a text lacks."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from rollfeed.environments.builtin.scoring import graded, no_answer
from rollfeed.environments.builtin.styled import Drawn, StyledQuestion
from rollfeed.types import Verdict

_CLOSING = {"(": ")", "[": "]", "<": ">"}  # no braces: they end a box
_BRACKETS = {*_CLOSING, *_CLOSING.values()}


class CloseBrackets(StyledQuestion):
    """Close ``2 + level // 2`` of two kinds, from level 3 on three, with as many closed pairs."""

    environment_id: str = "core/close_brackets"
    version: int = 1
    summary: str = "write the missing closing brackets; levels add open ones, closed ones, and a kind"
    max_level: int | None = 30
    instruction: str = "Answer with the missing closing brackets only."

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the chance of any one combination of the brackets that are open."""
        return 0.0, float(len(_kinds(level))) ** -(2 + level // 2)

    def _draw(self, level: int, random: Random) -> Drawn:
        pieces = random.choices(_kinds(level), k=2 + level // 2)
        answer = "".join(_CLOSING[kind] for kind in reversed(pieces))
        for kind in random.choices(_kinds(level), k=2 + level // 2):
            pieces.insert(random.randint(0, len(pieces)), kind + _CLOSING[kind])
        text = "".join(pieces)
        params = {"text": text, "missing": answer}
        return Drawn(f"Some brackets are not closed yet: {text}", f"close:{text}=", params, answer)

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Compare bracket by bracket; a wrong answer is worth the share before its first wrong one.

        The whole text, closed, is an answer too.
        """
        written, expected = self._written(params, response), params["missing"]
        if params["style"] == "chat":
            written = "".join(char for char in written if char in _BRACKETS).removeprefix(params["text"])
        if not written:
            return no_answer("bracket")
        lengths = len(written), len(expected)
        wrong = (at for at, (ours, theirs) in enumerate(zip(written, expected, strict=False)) if ours != theirs)
        partial = next(wrong, min(lengths)) / max(lengths)
        return graded(written, is_right=written == expected, partial=partial)


def _kinds(level: int) -> str:
    return "([<"[: 2 if level < 3 else 3]

"""Environments that ask in sentences, or in few characters for models that know nothing else."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from random import Random
from typing import Any, NamedTuple, Self

from rollfeed.answers import Mark, find_answer, find_claimed_number, without_end_token
from rollfeed.environments.builtin.scoring import graded, no_answer
from rollfeed.errors import ConfigError
from rollfeed.types import Verdict

_STYLES = ("chat", "compact")
_INTEGER = re.compile(r"-?[0-9]{1,40}")


class Drawn(NamedTuple):
    """A problem in both styles."""

    chat: str
    """The question, without the instruction."""
    compact: str
    params: dict[str, Any]
    answer: str
    """In the compact style it has no spaces."""
    pictures: tuple[str, ...] = ()
    """Data URIs, for the places ``<image>`` in the questions."""


class Styled:
    """An environment with a style, ``chat`` or ``compact``. Raises ConfigError if there is no such style."""

    environment_id: str

    def __init__(self, *, style: str = "chat") -> None:
        if style not in _STYLES:
            raise ConfigError(f"environment {self.environment_id}: style = {style!r}: must be {' or '.join(_STYLES)}")
        self._style = style

    def with_parameters(self, parameters: Mapping[str, Any]) -> Self:
        """Return the environment with another style. Raises ConfigError if there is no such parameter or style."""
        if unknown := sorted(parameters.keys() - {"style"}):
            raise ConfigError(f"environment {self.environment_id}: parameters.{unknown[0]}: there is only style")
        return type(self)(**parameters)


class StyledQuestion(Styled, ABC):
    """An environment that asks one question.

    ``chat`` asks in sentences; ``compact`` in few characters, and the answer is the response's first line as it is.
    """

    instruction: str = "Answer with a number."
    """The last line of a question in sentences: a response that repeats it has not answered yet."""

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        """Return a problem of the level in the environment's style."""
        drawn = self._draw(level, random)
        shown = {"pictures": list(drawn.pictures)} if drawn.pictures else {}
        params = {**drawn.params, **shown, "style": self._style}
        if self._style == "compact":
            return drawn.compact, params, drawn.answer.replace(" ", "")
        return f"{drawn.chat}\n{self.instruction}", params, drawn.answer

    @abstractmethod
    def _draw(self, level: int, random: Random) -> Drawn:
        """Return a problem of the level."""

    def _written(self, params: Mapping[str, Any], response: str) -> str:
        """Return the part of a response that is the answer; empty where there is none."""
        if params["style"] == "compact":
            return without_end_token(response).partition("\n")[0].strip()
        answer = find_answer(response, fallback=Mark.LAST_LINE)
        return "" if answer is None else answer.text

    def _claimed(self, params: Mapping[str, Any], response: str) -> Fraction | None:
        """Return the one number that a response gives as its answer."""
        if params["style"] == "chat":
            return find_claimed_number(response.rpartition(self.instruction)[2])
        line = self._written(params, response)
        return Fraction(line) if _INTEGER.fullmatch(line) else None


class StyledNumber(StyledQuestion):
    """An environment whose answer is the number ``params["answer"]``."""

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Compare the claimed number with the right one."""
        claimed = self._claimed(params, response)
        if claimed is None:
            return no_answer("number")
        return graded(str(claimed), is_right=claimed == params["answer"], partial=float(self._partial(params, claimed)))

    def _partial(self, params: Mapping[str, Any], claimed: Fraction) -> Fraction | float:
        """Return the worth of a wrong number: the less, the further off it is."""
        return 1 / (1 + abs(claimed - int(params["answer"])))

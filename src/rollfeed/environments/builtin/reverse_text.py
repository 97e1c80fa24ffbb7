"""``core/reverse_text``: a word backwards."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from rollfeed.answers import Mark, clean, find_answer, find_quoted, without_end_token
from rollfeed.environments.builtin.scoring import graded, no_answer
from rollfeed.environments.builtin.styled import Styled
from rollfeed.environments.tasks import TRAIN
from rollfeed.errors import ConfigError
from rollfeed.seeds import derive_seed
from rollfeed.types import Verdict

_SYMBOLS = "abcdefghijklmnopqrstuvwxyz0123456789"
_MAX_TRIES = 1_000
_MAX_COMPARED_SYMBOLS = 200
_SHARE_STEPS = 1 << 32


class ReverseText(Styled):
    """Reverse a word of ``2 + level`` symbols; the word is never the same backwards.

    A share of all words is held out: which, depends on the word and ``held_out_share`` alone, not on the run's seed, so
    that no run trains on a word that another is measured on. A word and its reverse are always on the same side.

    Args:
        style: ``chat`` asks in a sentence; ``compact`` is ``rev:abcd=`` for models that know nothing else, whose
            answer is the first line of the response as it is.
        alphabet_size: Different symbols, letters before digits.
        held_out_share: Of all words.
        split: ``train`` draws from the words that are not held out, any other split from those that are.

    Raises:
        ConfigError: If an argument is out of its bounds.
    """

    environment_id: str = "core/reverse_text"
    version: int = 1
    summary: str = "write a word backwards; levels make it longer"
    max_level: int | None = 40

    def __init__(
        self, *, style: str = "chat", alphabet_size: int = 26, held_out_share: float = 0.2, split: str = TRAIN
    ) -> None:
        super().__init__(style=style)
        where = f"environment {self.environment_id}"
        if type(alphabet_size) is not int or not 2 <= alphabet_size <= len(_SYMBOLS):
            raise ConfigError(f"{where}: alphabet_size = {alphabet_size!r}: must be 2 to {len(_SYMBOLS)}")
        if isinstance(held_out_share, bool | str) or not 0.0 < held_out_share < 1.0:
            raise ConfigError(f"{where}: held_out_share = {held_out_share!r}: must be above 0 and below 1")
        self._alphabet_size = alphabet_size
        self._held_out_share = held_out_share
        self._split = split

    def with_parameters(self, parameters: Mapping[str, Any]) -> ReverseText:
        """Return the environment with some of ``style``, ``alphabet_size`` and ``held_out_share`` changed.

        Raises:
            ConfigError: If there is no such parameter, or a value is out of its bounds.
        """
        own = self._parameters()
        unknown = sorted(parameters.keys() - own.keys())
        if unknown:
            raise ConfigError(
                f"environment {self.environment_id}: no parameter {unknown[0]!r}; it has {', '.join(own)}"
            )
        return ReverseText(**{**own, **parameters}, split=self._split)

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the chance of any one of the words."""
        share = 1 - self._held_out_share if self._split == TRAIN else self._held_out_share
        length, size = 2 + level, self._alphabet_size
        return 0.0, 1 / max(1.0, share * (size**length - size ** -(-length // 2)))

    def for_split(self, split: str) -> ReverseText:
        """Return the environment that makes the problems of a split."""
        return ReverseText(**self._parameters(), split=split)

    def is_held_out(self, word: str) -> bool:
        """Whether a word is in the other splits and not in ``train``."""
        drawn = derive_seed(self.environment_id, self.version, min(word, word[::-1]))
        return drawn % _SHARE_STEPS < self._held_out_share * _SHARE_STEPS

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        """Draw a word of the split.

        Raises:
            ValueError: If 1,000 words were drawn in vain: the alphabet is too small for the level.
        """
        length = 2 + level
        for _ in range(_MAX_TRIES):
            word = "".join(random.choices(_SYMBOLS[: self._alphabet_size], k=length))
            if word != word[::-1] and self.is_held_out(word) is (self._split != TRAIN):
                return self._question(word), {"text": word, "style": self._style}, word[::-1]
        raise ValueError(
            f"split {self._split} has hardly a word of {length} out of {self._alphabet_size} symbols: raise "
            "alphabet_size or the level"
        )

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Compare with the word backwards, exactly; a wrong answer is worth the share of symbols in their places."""
        response = without_end_token(response)
        expected = str(params["text"])[::-1]
        written = _first_line(response) if params["style"] == "compact" else _written_word(response)
        if not written:
            return no_answer("word")
        in_place = sum(ours == theirs for ours, theirs in zip(written, expected, strict=False))
        partial = in_place / max(len(written), len(expected))
        return graded(written[:_MAX_COMPARED_SYMBOLS], is_right=written == expected, partial=partial)

    def _parameters(self) -> dict[str, Any]:
        return {"style": self._style, "alphabet_size": self._alphabet_size, "held_out_share": self._held_out_share}

    def _question(self, word: str) -> str:
        if self._style == "compact":
            return f"rev:{word}="
        return f'Write "{word}" backwards, its last letter first. Answer with the reversed text only.'


def _first_line(response: str) -> str:
    return response.partition("\n")[0].strip()


def _written_word(response: str) -> str:
    """Return the marked answer, else the only quoted text, else the last line."""
    answer = find_answer(response, fallback=Mark.LAST_LINE)
    if answer is None:
        return ""
    quoted = find_quoted(answer.text)
    return clean(quoted[0] if len(quoted) == 1 else answer.text)

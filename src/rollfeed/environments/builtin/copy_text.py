"""``core/copy_text``: repeat a text word for word."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from rollfeed.answers import Mark, clean, find_answer, find_quoted
from rollfeed.environments.builtin.scoring import graded, no_answer
from rollfeed.environments.builtin.words import WORDS
from rollfeed.types import Verdict

_FIRST_LEVEL_WITH_LINES = 8
_MAX_COMPARED_WORDS = 64
_MAX_WORDS_AROUND_QUOTE = 8
"""With more words around it, a quoted text is talked about, not repeated."""
_WORD = re.compile(r"\w+")


class CopyText:
    """Copy a text; a level more is a word more, and from level 8 on it is one of several labelled lines."""

    environment_id: str = "core/copy_text"
    version: int = 1
    summary: str = "copy a text; levels add words, then other lines around it"
    max_level: int | None = 20

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the share of any one text, at most."""
        return 0.0, 0.01

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        """Draw ``1 + level`` words; from level 8 on 2 to 8 lines of 4 to 16 words, one of which is asked for."""
        if level < _FIRST_LEVEL_WITH_LINES:
            text = " ".join(random.sample(WORDS, 1 + level))
            return f'Text: "{text}"\n{_instruction("")}', {"text": text, "label": ""}, text
        steps = level - _FIRST_LEVEL_WITH_LINES
        lines = [" ".join(random.sample(WORDS, 4 + steps)) for _ in range(2 + steps // 2)]
        labels = "ABCDEFGH"[: len(lines)]
        # The last line is the graded part of a response that repeats all of them.
        wanted = random.randrange(len(lines) - 1)
        listed = "\n".join(f'{label}: "{line}"' for label, line in zip(labels, lines, strict=True))
        question = f"{listed}\n{_instruction(labels[wanted])}"
        return question, {"text": lines[wanted], "label": labels[wanted]}, lines[wanted]

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Compare the answer with the text, exactly but for white space, surrounding quotes and a final full stop.

        Where nothing is marked, the answer is the only quoted text with few words around it, or else the last line.
        A wrong one is worth twice the number of words it has in the same order, over the words of both.
        """
        copied = _copied_text(params["label"], response)
        if copied is None:
            return no_answer("text")
        ours, theirs = _WORD.findall(copied.casefold())[:_MAX_COMPARED_WORDS], _WORD.findall(params["text"])
        partial = 2 * _common_words(ours, theirs) / (len(ours) + len(theirs))
        return graded(copied, is_right=copied == params["text"], partial=partial)


def _instruction(label: str) -> str:
    return f"Repeat the text of line {label}." if label else "Repeat this text."


def _copied_text(label: str, response: str) -> str | None:
    # The question has the text in it: a response that repeats the question has not answered yet.
    answer = find_answer(response.rpartition(_instruction(label))[2], fallback=Mark.RAW)
    if answer is None:
        return None
    text, quoted = answer.text, find_quoted(answer.text)
    if not answer.marked:
        text = quoted[0] if _is_repeated(quoted, text) else text.strip().splitlines()[-1]
    return clean(clean(text).removeprefix(f"{label}:") if label else text)


def _is_repeated(quoted: Sequence[str], text: str) -> bool:
    if len(quoted) != 1:
        return False
    return len(_WORD.findall(text)) - len(_WORD.findall(quoted[0])) <= _MAX_WORDS_AROUND_QUOTE


def _common_words(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for column, other in enumerate(second, 1):
            diagonal, row[column] = row[column], diagonal + 1 if word == other else max(row[column], row[column - 1])
    return row[-1]

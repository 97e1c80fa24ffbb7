"""``core/constrained_words``: a sentence that keeps rules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from rollfeed.answers import clean, find_answer, find_quoted
from rollfeed.environments.builtin.scoring import graded, no_answer
from rollfeed.environments.builtin.words import WORDS
from rollfeed.types import Verdict

_FORBIDDEN = ("the", "a", "is", "and", "of", "in")
_WORD = re.compile(r"\w+(?:['\u2019]\w+)*")
_FIRST_LEVEL_WITH_EXACT_LENGTH = 6
_FIRST_LEVEL_WITH_LAST_WORD = 9


class ConstrainedWords:
    """Write a sentence with some words and without others; a level more is a rule more or a tighter one."""

    environment_id: str = "core/constrained_words"
    version: int = 1
    summary: str = "write a sentence that keeps rules; levels add words to use, words to avoid, and an exact length"
    max_level: int | None = 14

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the chance that one sentence, always the same, has the words to use."""
        return 0.0, 0.06

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        """Draw ``1 + (level + 1) // 3`` words to use, ``level // 2`` (at most 4) to avoid, and a number of words."""
        include = random.sample(WORDS, 1 + (level + 1) // 3)
        exclude = random.sample(_FORBIDDEN, min(level // 2, 4))
        shortest, longest = 3, 10
        if level >= _FIRST_LEVEL_WITH_EXACT_LENGTH:
            shortest = longest = random.randint(len(include) + 2, len(include) + 6)
        last = include[-1] if level >= _FIRST_LEVEL_WITH_LAST_WORD else None
        params = {"include": include, "exclude": exclude, "min_words": shortest, "max_words": longest, "last": last}
        return _question(params), params, _sentence(params)

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Check every rule; a wrong answer is worth the share of rules it keeps.

        Words are compared without regard to case. Words to avoid count as a rule kept only where a word to use is
        there, and the length only with enough different words: neither pays for nonsense.
        """
        answer = find_answer(response)
        words = [] if answer is None else _words(answer.text)
        if answer is None or not words:
            return no_answer("sentence")
        sentence = answer.text
        quoted = [text for text in find_quoted(sentence) if len(_words(text)) >= params["min_words"]]
        if len(quoted) == 1:
            sentence, words = quoted[0], _words(quoted[0])
        broken, num_rules = _broken_rules(params, words)
        return graded(
            clean(sentence),
            is_right=not broken,
            partial=1 - len(broken) / num_rules,
            detail=f"broken: {', '.join(broken)}" if broken else "",
        )


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def _broken_rules(params: Mapping[str, Any], words: Sequence[str]) -> tuple[list[str], int]:
    """Return what is broken, and the number of all rules."""
    included = [word in words for word in params["include"]]
    rules = {f"with {word!r}": kept for word, kept in zip(params["include"], included, strict=True)}
    rules |= {f"without {word!r}": any(included) and word not in words for word in params["exclude"]}
    long_enough = len(set(words)) >= min(params["min_words"], 3) and len(words) >= params["min_words"]
    rules[f"{params['min_words']} to {params['max_words']} words"] = long_enough and len(words) <= params["max_words"]
    if params["last"] is not None:
        rules[f"{params['last']!r} last"] = words[-1] == params["last"]
    return [rule for rule, kept in rules.items() if not kept], len(rules)


def _question(params: Mapping[str, Any]) -> str:
    shortest, longest = params["min_words"], params["max_words"]
    length = f"exactly {longest}" if shortest == longest else f"{shortest} to {longest}"
    parts = [f"Write one sentence with {length} words.", f"It must contain {_listed(params['include'], 'and')}."]
    if params["exclude"]:
        parts.append(f"Do not use {_listed(params['exclude'], 'or')}.")
    if params["last"] is not None:
        parts.append(f'The last word must be "{params["last"]}".')
    return " ".join(parts)


def _listed(words: Sequence[str], conjunction: str) -> str:
    quoted = [f'"{word}"' for word in words]
    if len(quoted) == 1:
        return f"the word {quoted[0]}"
    return f"the words {', '.join(quoted[:-1])} {conjunction} {quoted[-1]}"


def _sentence(params: Mapping[str, Any]) -> str:
    """Return an answer that keeps the rules, though it makes no sense."""
    fillers = [word for word in WORDS if word not in params["include"]][: params["min_words"] - len(params["include"])]
    return " ".join([*fillers, *params["include"]]).capitalize() + "."

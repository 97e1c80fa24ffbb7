r"""Answers as text: keys that are equal only for texts that mean the same.

Two keys an answer: one for formulas, in which space and looks do not count but case does, and one for
words, in which case does not count but nothing else is left out.
"""

from __future__ import annotations

import re

from rollfeed.answers import clean, normalize

MAX_CHARS = 20_000
"""Longer texts have only themselves in common with others."""

_WRAPPERS = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mathit|mathsf|mathtt|boldsymbol|bm|mbox"
    r"|hbox|emph|underline|boxed|fbox)\s?\{([^{}]*)\}"
)
_LOOKS = re.compile(
    r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|textstyle|quad|qquad|limits)(?![A-Za-z])|\\[,;:! ]|~|\\[()\[\]]"
)
_RENAMED = re.compile(r"\\(?:d|t|c)frac(?![A-Za-z])")
_DOTS = re.compile(r"\\(?:ldots|cdots|dots[bcmio]?)(?![A-Za-z])|\.\.\.")
_SPACE = re.compile(r"\s+")
_LOOSE_SPACE = re.compile(r"(?<![0-9A-Za-z\\]) | (?![0-9A-Za-z])")
_SPACE_AFTER_NUMBER = re.compile(r"(?<=[0-9]) (?=[A-Za-z])")
_REAL_WORD = re.compile(r"[^\W\d_]{2}")
_WORDS = re.compile(r"[^\W\d_][\w '’.,&/-]*[^\W_]\.?|[^\W\d_]")  # noqa: RUF001
_OPTION = re.compile(r"[(\[]?([A-DF-HJa-df-hj])[)\].:]?")


def without_markdown(text: str) -> str:
    """Return an answer without the bold marks, code marks or quotes around all of it."""
    text = text.strip()
    for opening, closing in (("**", "**"), ("`", "`"), ('"', '"'), ("\u201c", "\u201d")):
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
    return text


def formula_key(text: str) -> str:
    """Return what two spellings of one formula have in common; empty for an empty answer."""
    text = text.strip()
    if len(text) > MAX_CHARS:
        return text
    text = normalize(text)
    text = _DOTS.sub(r"\\dots ", text)
    text = _LOOKS.sub(" ", _WRAPPERS.sub(r" \1 ", text.replace("\\$", " ").replace("$", " ")))
    text = _SPACE.sub(" ", _RENAMED.sub(r"\\frac", text)).strip()
    text = _SPACE_AFTER_NUMBER.sub("", text)
    return _LOOSE_SPACE.sub("", text).replace("\\%", "%").removesuffix(".")


def words_key(text: str) -> str | None:
    """Return what two spellings of an answer in words have in common, or None when it is not in words.

    Words are letters and what stands between them; the letter of an option is one, with or without brackets.
    """
    if len(text) > MAX_CHARS:
        return None
    text = normalize(text).replace("$", " ")
    for _ in range(3):
        text = _WRAPPERS.sub(r"\1", text)
    text = clean(_LOOKS.sub(" ", text))
    option = _OPTION.fullmatch(text)
    if option is not None:
        return option[1].casefold()
    return text.casefold() if _REAL_WORD.search(text) and _WORDS.fullmatch(text) else None

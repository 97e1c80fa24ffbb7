r"""The answer inside a response: one extractor for graders and environments.

Pure functions on text at the level of ``types``, so that parts which may not import each other share
them. Invariants: nothing here raises, whatever a model wrote, and the work is linear in the text,
of which only the last ``MAX_CHARS`` characters are looked at.

What counts as the answer, in this order: the last ``\boxed{...}`` (braces balanced), the last
``<answer>...</answer>``, the last "Answer:" or "answer is" line, then a fallback the caller names. Only
the text after the reasoning's ``</think>`` is read.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

_END_TOKEN = re.compile(r"(?:<\|\w+\|>|<\uff5c[\w\u2581]+\uff5c>|</s>|<eos>|<end>|<end_of_turn>)\Z")
_MAX_END_TOKEN = 40
MAX_CHARS = 20_000
"""An answer further than this from the end of the response is not found."""

# NFKC sorts runs of combining marks in quadratic time; no writing system stacks as many as this.
_MAX_COMBINING_RUN = 30

_BRACES = re.compile(r"\\(?:boxed|fbox)\s?\{|\\[{}]|\\\\(?!boxed|fbox)|[{}]")
_FENCE = re.compile(r"^([ \t]*)(```+|~~~+)[ \t]*\{?\.?([\w+.#-]*)[^\n`]*$", re.MULTILINE)
_MAX_CLOSING_INDENT = 3
"""Spaces that a closing fence has more than its opening one; a fence further to the right is a line of the code."""
_SURROGATES = re.compile("[\ud800-\udfff]")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
# Signs that are written for a minus, and the bar of fractions.
_RAISED = r"[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]"
_SUPERSCRIPT = re.compile(
    rf"[\u207a\u207b]?(?:(?P<formula>{_RAISED}*[\u207f\u2071\u02e3](?:[\u207a\u207b]?{_RAISED}+)?)|{_RAISED}+)"
)
# A subscript after a digit or a variable is one of mathematics (1011_2, x_1); one in a chemical formula is not.
_SUBSCRIPT = re.compile(
    r"(?:(?<=[0-9])|(?<=log)|(?<=(?<![^\W\d])[^\W\d_])|(?<=[\u2080-\u2089][a-z]))[\u2080-\u2089]+(?![A-Z])"
)
_NUMBER_SETS = {"\u2115": "N", "\u2124": "Z", "\u211a": "Q", "\u211d": "R", "\u2102": "C"}
_PLAIN_SIGNS = dict.fromkeys([0x2212, 0x2010, 0x2012, 0x2013, 0x2014], "-") | {0x2044: "/"}
_TAGS = re.compile(r"<(/?)answer>", re.IGNORECASE)
_ANSWER_LINE = re.compile(r"\banswer(?:[ \t]+is\b[ \t*_]*:?|[ \t*_]*[:=])", re.IGNORECASE)
_FIRST_SENTENCE_END = re.compile(r"[.!?;](?=\s|$)|\s(?:because|since|as)\b", re.IGNORECASE)
_CLAIM_WORD = re.compile(r"[=:]|\b(?:is|are|equals|makes|gives|be)\b|\b(?:equal to|total of)\b", re.IGNORECASE)
_QUOTED = re.compile(r'"([^"\n]+)"|\u201c([^\u201d\n]+)\u201d')
_WRAPPING = " \t\n*_`\"'\u201c\u201d\u2018\u2019$"

# A number stands alone: not inside a word, an exponent, a date or a version. Digits are ASCII; NFKC made them so.
_DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = re.compile(
    rf"""
    (?<! [0-9]\. ) (?: (?<![\w^/)\]}}]) (?P<sign>[-+]) \$? | (?<![\w^/]) )
    (?:
        (?: (?P<whole>[0-9]+)[ ] )? (?P<numerator>{_DIGITS}) [ ]?/[ ]? (?P<denominator>[0-9]+)
      | (?P<decimal> (?:{_DIGITS})(?:\.[0-9]+)? | (?<!\.)\.[0-9]+ ) (?P<exponent>[eE][-+]?[0-9]{{1,3}})?
    )
    (?! [0-9^] | \.[0-9] | [ ]?/[ ]?[0-9] | [eE][-+]?[0-9] )
    """,
    re.VERBOSE,
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s?\{\s?([0-9]+)\s?\}\s?\{\s?([0-9]+)\s?\}")
_LATEX_DEGREES = re.compile(r"\^\s?(?:\\circ|\{\s?\\circ\s?\})")
_MIXED_LATEX = re.compile(r"(?<=[0-9])(?=\\[dt]?frac)")
_LATEX_SPACING = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,!])(?=[0-9]{3})")
# Python refuses to read longer integers, and nobody means one.
_MAX_DIGITS = 1_000


class Mark(StrEnum):
    """A sign by which the answer was told from the rest of the response."""

    BOXED = "boxed"
    TAG = "tag"
    LINE = "line"
    LAST_LINE = "last_line"
    """Not marked: the last line that is not blank."""
    RAW = "raw"
    """Not marked: the whole text."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as written, and how it was found."""

    text: str
    mark: Mark

    @property
    def marked(self) -> bool:
        """Whether the response itself says which part is the answer."""
        return self.mark in (Mark.BOXED, Mark.TAG, Mark.LINE)


def after_reasoning(response: str) -> str:
    """Return what follows the last ``</think>`` as it is; reasoning that never ends leaves nothing."""
    text = response[response.rfind("</think>") + len("</think>") :] if "</think>" in response else response
    return text.partition("<think>")[0]


def final_text(response: str) -> str:
    """Return the end of what follows the reasoning, NFKC-normalised."""
    return normalize(after_reasoning(response)[-MAX_CHARS:])[-MAX_CHARS:]


def without_end_token(response: str) -> str:
    """Return the response without the token that ended it, which is in its text unless special tokens are skipped."""
    found = _END_TOKEN.search(response, max(0, len(response) - _MAX_END_TOKEN))
    return response if found is None else response[: found.start()]


def normalize(text: str) -> str:
    """Return ``text`` in NFKC with plain minus signs and digits, and with super- and subscripts as ``^`` and ``_``.

    Lone surrogates, which no file and no pipe takes, become replacement characters; invisible signs go.
    """
    if text.isascii():
        return text
    text = _INVISIBLE.sub("", _SURROGATES.sub("\ufffd", text))
    if _has_long_combining_run(text):
        return text
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0]}}}" if match["formula"] else "^" + match[0], text)
    text = re.sub(r"(?<=\d)\s?[\u00ba\u02da]", "\u00b0", text)
    text = _SUBSCRIPT.sub(lambda match: "_" + match[0], text)
    text = re.sub("[\u2115\u2124\u211a\u211d\u2102]", lambda match: f"\\mathbb{{{_NUMBER_SETS[match[0]]}}}", text)
    text = re.sub(r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3})", ",", text)
    text = re.sub(r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])", " ", text)
    text = unicodedata.normalize("NFKC", text).translate(_PLAIN_SIGNS)
    return re.sub(r"(?![0-9])\d", lambda digit: str(unicodedata.decimal(digit[0])), text)


def find_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` of ``text``; empty text when that box never closes."""
    opened: list[int | None] = []  # content start for a box, None for a plain brace
    last_start, content = -1, ""
    for token in _BRACES.finditer(text):
        if len(token[0]) > len("\\\\"):
            opened.append(token.end())
            last_start, content = token.end(), ""
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened and opened.pop() == last_start:
            content = text[last_start : token.start()]
    return None if last_start < 0 else content


def find_code(response: str, *, languages: Collection[str] | None = None) -> str | None:
    """Return the last fenced code block after the reasoning, or None when there is none or the last one never ends.

    Args:
        response: As generated.
        languages: In lower case, those to look for, "" for blocks that name none; None takes all.

    The block's lines lose the indentation of its fence and are as they are otherwise.
    """
    text = after_reasoning(response)
    opening: re.Match[str] | None = None
    code: str | None = None
    for match in _FENCE.finditer(text):
        if opening is None or (match[3] and not opening[3]):  # what opens without a language may be but a line drawn
            opening = match
        elif not match[2].startswith(opening[2]) or len(match[1]) > len(opening[1]) + _MAX_CLOSING_INDENT:
            continue  # a line of the code
        elif match[3]:  # a fence that names a language opens a block
            opening = match
        else:
            if languages is None or opening[3].lower() in languages:
                code = _without_indent(text[opening.end() + 1 : match.start()], len(opening[1]))
            opening = None
    return code if opening is None else None


def _without_indent(code: str, width: int) -> str:
    return re.sub(rf"^[ \t]{{1,{width}}}", "", code, flags=re.MULTILINE) if width else code


def find_answer(response: str, *, fallback: Mark = Mark.LAST_LINE) -> Answer | None:
    r"""Return the answer, or None when there is none: no text, or a ``\boxed{`` that never closes."""
    text = final_text(response)
    if not text.strip():
        return None
    box = find_box(text)
    if box is not None:
        return Answer(box, Mark.BOXED) if box.strip() else None
    for mark, marked in ((Mark.TAG, find_tag(text)), (Mark.LINE, _last_answer_line(text))):
        if marked is not None:
            return Answer(marked, mark) if marked.strip() else None
    return Answer(text.strip().splitlines()[-1] if fallback is Mark.LAST_LINE else text, fallback)


def clean(text: str) -> str:
    """Return ``text`` with single spaces, and without surrounding quotes, markdown and a final full stop."""
    text = " ".join(text.split())
    wrapping = _WRAPPING
    bare = text.strip(wrapping).removesuffix(".").strip(wrapping)
    if "$" in bare:  # several formulas: their signs belong together
        wrapping = wrapping.replace("$", "")
        bare = text.strip(wrapping).removesuffix(".").strip(wrapping)
    return bare or text


def find_quoted(text: str) -> list[str]:
    """Return the parts of ``text`` within double quotes, in order; none goes over a line's end."""
    return [straight or curly for straight, curly in _QUOTED.findall(text)]


def find_numbers(text: str) -> list[Fraction]:
    """Return the numbers in ``text`` in order, exactly: integers, decimals, thousands, fractions, mixed numbers."""
    text = _LATEX_SPACING.sub(",", _LATEX_DEGREES.sub("", text)).replace("^{", "^")
    text = _LATEX_FRACTION.sub(r"\1/\2", _MIXED_LATEX.sub(" ", text))
    numbers = (_to_fraction(match) for match in _NUMBER.finditer(text))
    return [number for number in numbers if number is not None]


def find_claimed_number(response: str, *, given: Collection[int] = ()) -> Fraction | None:
    """Return the one number that a response gives as its answer, or None when it gives none or several.

    Looked at is the marked answer (of an "Answer:" line its first sentence), or else the last line with a
    number. Numbers ``given`` in the question do not count as answers. Where several are left, only
    what follows the last "=", ":" or "is" counts, so that a list of candidates claims nothing.
    """
    answer = find_answer(response, fallback=Mark.RAW)
    if answer is None:
        return None
    text = _FIRST_SENTENCE_END.split(answer.text, maxsplit=1)[0] if answer.mark is Mark.LINE else answer.text
    for line in reversed(text.splitlines()):
        claimed = set(find_numbers(line)) - set(given)
        if len(claimed) > 1:
            claimed = set(find_numbers(_after_claim_word(line))) - set(given)
            return claimed.pop() if len(claimed) == 1 else None
        if claimed:
            return claimed.pop()
    return None


def _after_claim_word(line: str) -> str:
    *_, end = [0, *(match.end() for match in _CLAIM_WORD.finditer(line))]
    return line[end:]


def _to_fraction(match: re.Match[str]) -> Fraction | None:
    if match.end() - match.start() > _MAX_DIGITS:
        return None
    sign = -1 if match["sign"] == "-" else 1
    if match["decimal"] is not None:
        text = match["decimal"].replace(",", "") + (match["exponent"] or "")
        return Fraction(sign * int(text)) if text.isdigit() else sign * Fraction(text)
    denominator = int(match["denominator"])
    if denominator == 0:
        return None
    return sign * (int(match["whole"] or 0) + Fraction(int(match["numerator"].replace(",", "")), denominator))


def _has_long_combining_run(text: str) -> bool:
    run = 0
    for char in text:
        run = run + 1 if unicodedata.combining(char) else 0
        if run > _MAX_COMBINING_RUN:
            return True
    return False


def find_tag(text: str) -> str | None:
    """Return the content of the last ``<answer>...</answer>`` of ``text``; None where none closes."""
    start, content = None, None
    for tag in _TAGS.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start is not None:
            start, content = None, text[start : tag.start()]
    return content


def _last_answer_line(text: str) -> str | None:
    """Return what follows the last "Answer:" on its line, or the next line that is not blank."""
    last = None
    for last in _ANSWER_LINE.finditer(text):  # noqa: B007
        pass
    if last is None:
        return None
    rest = text[last.end() :].lstrip()
    return clean(rest.splitlines()[0]) if rest.strip("*_ ") else ""

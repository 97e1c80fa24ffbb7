"""Checks of the instructions that a response can be seen to follow, by the ids that data sets use."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from rollfeed.rewards.ifeval.language import is_in_language, known_languages

Arguments: TypeAlias = Mapping[str, Any]
Check: TypeAlias = Callable[[str, Arguments], bool]
"""Whether a response follows an instruction; raises ArgumentError for arguments it cannot use."""

_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_COMMAS = ",\u060c\u3001\uff0c"
_ABBREVIATION = re.compile(
    r"\b(?:mr|mrs|ms|dr|prof|st|vs|etc|e\.g|i\.e|jr|sr|inc|ltd|no|fig|u\.s)\.$|\b[A-Z]\.$", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"[.!?\u3002\uff01\uff1f]+[\"'\u201d\u2019)\]*]{0,4}(?=\s|$)|[\u3002\uff01\uff1f]")
_DIVIDER = re.compile(r"\s?\*{3}\s?")
_BULLET = re.compile(r"^[ \t]*(?:\*(?!\*)|-(?!-)|\u2022|\+)[ \t]*\S", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*")
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]+\]")
_TITLE = re.compile(r"<<([^<>\n]+)>>")
_FENCED = re.compile(r"```[ \t]*(?:json)?[ \t]*\n?(.*)```", re.DOTALL | re.IGNORECASE)
_WORD = re.compile(r"\w+")
_WORD_WITH_SIGNS = re.compile(r"[\w'-]+")
_NUMBER = re.compile(r"(?<![\w.])[0-9][0-9,]*(?:\.[0-9]+)?")


class ArgumentError(ValueError):
    """An instruction's arguments are missing or of a wrong kind: the data is at fault, not the response."""


def follows(response: str, instruction: str, arguments: Arguments) -> bool:
    """Whether a response follows an instruction; nothing follows one with an empty response or an unknown id.

    Raises:
        ArgumentError: If arguments are missing or wrong.
    """
    check = INSTRUCTIONS.get(instruction)
    return check is not None and bool(response.strip()) and check(response, arguments)


def _number(arguments: Arguments, name: str) -> int:
    value = arguments.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ArgumentError(f"{name} = {value!r:.60} must be a number")
    return value


def _text(arguments: Arguments, name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ArgumentError(f"{name} = {value!r:.60} must be a text")
    return value


def _texts(arguments: Arguments, name: str) -> list[str]:
    value = arguments.get(name)
    if not isinstance(value, list | tuple) or not value or not all(isinstance(each, str) and each for each in value):
        raise ArgumentError(f"{name} = {value!r:.60} must be a list of texts")
    return list(value)


def _holds(count: int, arguments: Arguments, limit: str, relation: str = "relation") -> bool:
    """Whether ``count`` stands in the named relation to the limit."""
    wanted = _number(arguments, limit)
    match arguments.get(relation):
        case "at least" | "more than or equal to" | None:
            return count >= wanted
        case "less than":
            return count < wanted
        case "at most":
            return count <= wanted
        case "more than":
            return count > wanted
        case "exactly" | "equal to":
            return count == wanted
        case other:
            raise ArgumentError(f"{relation} = {other!r:.60} must be 'at least' or 'less than'")


def _letter_frequency(response: str, arguments: Arguments) -> bool:
    letter = _text(arguments, "letter")
    if len(letter) != 1:
        raise ArgumentError(f"letter = {letter!r:.60} must be one character")
    return _holds(response.lower().count(letter.lower()), arguments, "let_frequency", "let_relation")


def _has_word(word: str, response: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", response, re.IGNORECASE) is not None


def _response_language(response: str, arguments: Arguments) -> bool:
    language = _text(arguments, "language").lower()
    if language not in known_languages():
        raise ArgumentError(f"language = {language!r:.20} is not known")
    return is_in_language(response, language)


def _num_sentences(response: str) -> int:
    """Count sentences; full stops after abbreviations and initials end none."""
    count, start = 0, 0
    for end in _SENTENCE_END.finditer(response):
        sentence = response[start : end.end()]
        if not any(char.isalnum() for char in sentence) or _ABBREVIATION.search(sentence[-12:]):
            continue
        count, start = count + 1, end.end()
    return count + any(char.isalnum() for char in response[start:])


def _parts(parts: list[str]) -> list[str]:
    """Return what dividers part, stripped; empty parts count inside of a text, and not at its ends."""
    last = len(parts) - 1
    return [part.strip() for place, part in enumerate(parts) if part.strip() or 0 < place < last]


def _number_paragraphs(response: str, arguments: Arguments) -> bool:
    paragraphs = _parts(_DIVIDER.split(response))
    return all(paragraphs) and len(paragraphs) == _number(arguments, "num_paragraphs")


def _nth_paragraph_first_word(response: str, arguments: Arguments) -> bool:
    """As many paragraphs as wanted, divided by blank lines, and the n-th begins with the word."""
    paragraphs = [part.strip() for part in re.split(r"\n\n+", response) if part.strip()]
    place = _number(arguments, "nth_paragraph")
    if place < 1:
        raise ArgumentError("nth_paragraph must be at least 1")
    num_paragraphs, first_word = _number(arguments, "num_paragraphs"), _text(arguments, "first_word")
    if len(paragraphs) != num_paragraphs or place > len(paragraphs):
        return False
    word = paragraphs[place - 1].split()[0].lstrip("\"'*_(\u201c\u2018")
    return re.split(r"[.,?!'\":;)*_]", word, maxsplit=1)[0].lower() == first_word.lower()


def _postscript(response: str, arguments: Arguments) -> bool:
    """A line begins with the postscript's marker."""
    marker = arguments.get("postscript_marker") or "P.S."
    letters = [letter for letter in str(marker) if letter.isalnum()]
    if not letters:
        raise ArgumentError(f"postscript_marker = {marker!r:.60} has no letters")
    pattern = r"\.?\s?".join(re.escape(letter) for letter in letters)
    return re.search(rf"^[ \t*_]{{0,8}}{pattern}\b", response, re.IGNORECASE | re.MULTILINE) is not None


def _multiple_sections(response: str, arguments: Arguments) -> bool:
    """At least as many sections, each begun by the marker and a number, as wanted."""
    marker = _text(arguments, "section_spliter" if arguments.get("section_spliter") else "section_splitter").strip()
    found = re.findall(rf"^[ \t#*]{{0,8}}{re.escape(marker)}[ \t]?[0-9]+", response, re.MULTILINE)
    return len(found) >= _number(arguments, "num_sections")


def _num_highlights(response: str) -> int:
    return sum(bool((double or single).strip()) for double, single in _HIGHLIGHT.findall(response))


def _json_format(response: str, arguments: Arguments) -> bool:
    """The whole response is JSON, maybe in one fenced block."""
    bare = response.strip()
    fenced = _FENCED.fullmatch(bare)
    try:
        json.loads(fenced[1].strip() if fenced else bare)
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(response: str, arguments: Arguments) -> bool:
    answers = _parts(response.split("******"))
    return len(answers) == 2 and answers[0] != answers[1] and all(answers)


def _bare(text: str) -> str:
    return text.strip().lower()


def _starts(argument: str) -> Check:
    return lambda response, arguments: _bare(response).startswith(_bare(_text(arguments, argument)))


def _limit_of(arguments: Arguments, name: str) -> str:
    return "N" if "N" in arguments else name


def _counted(count: Callable[[str], int], limit: str, relation: str = "relation") -> Check:
    return lambda response, arguments: _holds(count(response), arguments, limit, relation)


INSTRUCTIONS: Mapping[str, Check] = MappingProxyType(
    {
        # Keywords and parts of words: plurals and other forms count.
        "keywords:existence": lambda response, arguments: all(
            keyword.lower() in response.lower() for keyword in _texts(arguments, "keywords")
        ),
        "keywords:frequency": lambda response, arguments: _holds(
            response.lower().count(_text(arguments, "keyword").lower()), arguments, "frequency"
        ),
        "keywords:forbidden_words": lambda response, arguments: (
            not any(_has_word(word, response) for word in _texts(arguments, "forbidden_words"))
        ),
        "keywords:letter_frequency": _letter_frequency,
        "language:response_language": _response_language,
        "length_constraints:number_sentences": _counted(_num_sentences, "num_sentences"),
        "length_constraints:number_paragraphs": _number_paragraphs,
        "length_constraints:number_words": _counted(lambda response: len(_WORD.findall(response)), "num_words"),
        "length_constraints:number_lines": _counted(
            lambda response: sum(bool(line.strip()) for line in response.splitlines()), "num_lines"
        ),
        "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
        "detectable_content:number_placeholders": lambda response, arguments: (
            len(_PLACEHOLDER.findall(response)) >= _number(arguments, "num_placeholders")
        ),
        "detectable_content:postscript": _postscript,
        "detectable_format:number_bullet_lists": lambda response, arguments: (
            len(_BULLET.findall(response)) == _number(arguments, "num_bullets")
        ),
        "detectable_format:constrained_response": lambda response, _: any(each in response for each in _CONSTRAINED),
        "detectable_format:number_highlighted_sections": lambda response, arguments: (
            _num_highlights(response) >= _number(arguments, "num_highlights")
        ),
        "detectable_format:multiple_sections": _multiple_sections,
        "detectable_format:json_format": _json_format,
        "detectable_format:title": lambda response, _: any(name.strip() for name in _TITLE.findall(response)),
        "combination:two_responses": _two_responses,
        "combination:repeat_prompt": _starts("prompt_to_repeat"),
        "startend:start_checker": _starts("start_phrase"),
        "startend:end_checker": lambda response, arguments: (
            response.strip().strip('"').lower().endswith(_bare(_text(arguments, "end_phrase")))
        ),
        "startend:quotation": lambda response, _: re.fullmatch(r'".*"', response.strip(), re.DOTALL) is not None,
        "change_case:capital_word_frequency": _counted(
            lambda response: sum(word.isupper() for word in _WORD_WITH_SIGNS.findall(response)),
            "capital_frequency",
            "capital_relation",
        ),
        "change_case:english_capital": lambda response, _: response.isupper(),
        "change_case:english_lowercase": lambda response, _: response.islower(),
        "punctuation:no_comma": lambda response, _: not any(comma in response for comma in _COMMAS),
        "count:unique_words": lambda response, arguments: _holds(
            len({word.lower() for word in _WORD.findall(response)}), arguments, _limit_of(arguments, "num_words")
        ),
        "count:numbers": lambda response, arguments: (
            len(_NUMBER.findall(response)) == _number(arguments, _limit_of(arguments, "num_numbers"))
        ),
    }
)
"""How responses are checked, by the ids of data sets."""

"""Instructions about sentences, paragraphs, sections and markdown."""

from __future__ import annotations

import json
import re

from rollfeed.rewards.ifeval.arguments import ArgumentError, Arguments, holds, number, text

_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
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


def number_sentences(response: str, arguments: Arguments) -> bool:
    """The response has as many sentences as wanted."""
    return holds(num_sentences(response), arguments, "num_sentences")


def num_sentences(response: str) -> int:
    """Count sentences; full stops after abbreviations and initials end none."""
    count, start = 0, 0
    for end in _SENTENCE_END.finditer(response):
        sentence = response[start : end.end()]
        if not any(char.isalnum() for char in sentence) or _ABBREVIATION.search(sentence[-12:]):
            continue
        count, start = count + 1, end.end()
    return count + any(char.isalnum() for char in response[start:])


def number_paragraphs(response: str, arguments: Arguments) -> bool:
    """Exactly as many paragraphs, divided by ``***``, as wanted; none in the middle is empty."""
    paragraphs = _DIVIDER.split(response)
    inner = [part for place, part in enumerate(paragraphs) if part.strip() or 0 < place < len(paragraphs) - 1]
    return all(part.strip() for part in inner) and len(inner) == number(arguments, "num_paragraphs")


def nth_paragraph_first_word(response: str, arguments: Arguments) -> bool:
    """As many paragraphs as wanted, divided by blank lines, and the n-th begins with the word."""
    paragraphs = [part.strip() for part in re.split(r"\n\n+", response) if part.strip()]
    place = number(arguments, "nth_paragraph")
    if place < 1:
        raise ArgumentError("nth_paragraph must be at least 1")
    num_paragraphs, first_word = number(arguments, "num_paragraphs"), text(arguments, "first_word")
    if len(paragraphs) != num_paragraphs or place > len(paragraphs):
        return False
    word = paragraphs[place - 1].split()[0].lstrip("\"'*_(\u201c\u2018")
    bare = re.split(r"[.,?!'\":;)*_]", word, maxsplit=1)[0]
    return bare.lower() == first_word.lower()


def number_placeholders(response: str, arguments: Arguments) -> bool:
    """At least as many placeholders in square brackets as wanted."""
    return len(_PLACEHOLDER.findall(response)) >= number(arguments, "num_placeholders")


def postscript(response: str, arguments: Arguments) -> bool:
    """A line begins with the postscript's marker."""
    marker = arguments.get("postscript_marker") or "P.S."
    letters = [letter for letter in str(marker) if letter.isalnum()]
    if not letters:
        raise ArgumentError(f"postscript_marker = {marker!r:.60} has no letters")
    pattern = r"\.?\s?".join(re.escape(letter) for letter in letters)
    return re.search(rf"^[ \t*_]{{0,8}}{pattern}\b", response, re.IGNORECASE | re.MULTILINE) is not None


def number_bullet_lists(response: str, arguments: Arguments) -> bool:
    """Exactly as many bullet points as wanted."""
    return len(_BULLET.findall(response)) == number(arguments, "num_bullets")


def constrained_response(response: str, arguments: Arguments) -> bool:
    """One of the three allowed answers occurs."""
    return any(answer in response for answer in _CONSTRAINED)


def number_highlighted_sections(response: str, arguments: Arguments) -> bool:
    """At least as many parts in asterisks as wanted."""
    count = sum(bool((double or single).strip()) for double, single in _HIGHLIGHT.findall(response))
    return count >= number(arguments, "num_highlights")


def multiple_sections(response: str, arguments: Arguments) -> bool:
    """At least as many sections, each begun by the marker and a number, as wanted."""
    marker = arguments.get("section_spliter") or arguments.get("section_splitter")
    if not isinstance(marker, str) or not marker.strip():
        raise ArgumentError(f"section_spliter = {marker!r:.60} must be a text")
    found = re.findall(rf"^[ \t#*]{{0,8}}{re.escape(marker.strip())}[ \t]?[0-9]+", response, re.MULTILINE)
    return len(found) >= number(arguments, "num_sections")


def json_format(response: str, arguments: Arguments) -> bool:
    """The whole response is JSON, maybe in one fenced block."""
    bare = response.strip()
    fenced = _FENCED.fullmatch(bare)
    try:
        json.loads(fenced[1].strip() if fenced else bare)
    except (ValueError, RecursionError):
        return False
    return True


def title(response: str, arguments: Arguments) -> bool:
    """A title in double angular brackets occurs."""
    return any(name.strip() for name in _TITLE.findall(response))


def two_responses(response: str, arguments: Arguments) -> bool:
    """Two different answers are divided by six asterisks."""
    parts = response.split("******")
    answers = [part.strip() for place, part in enumerate(parts) if part.strip() or 0 < place < len(parts) - 1]
    return len(answers) == 2 and answers[0] != answers[1] and all(answers)


def repeat_prompt(response: str, arguments: Arguments) -> bool:
    """The response begins with the prompt, word by word."""
    return response.strip().lower().startswith(text(arguments, "prompt_to_repeat").strip().lower())


def end_checker(response: str, arguments: Arguments) -> bool:
    """The response ends with the phrase and nothing after it."""
    phrase = text(arguments, "end_phrase").strip().lower()
    return response.strip().strip('"').lower().endswith(phrase)


def start_checker(response: str, arguments: Arguments) -> bool:
    """The response begins with the phrase."""
    return response.strip().lower().startswith(text(arguments, "start_phrase").strip().lower())


def quotation(response: str, arguments: Arguments) -> bool:
    """The whole response stands in double quotes."""
    bare = response.strip()
    return len(bare) > 1 and bare[0] == bare[-1] == '"'


def number_lines(response: str, arguments: Arguments) -> bool:
    """As many lines that are not blank as wanted."""
    return holds(sum(bool(line.strip()) for line in response.splitlines()), arguments, "num_lines")

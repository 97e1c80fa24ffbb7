"""Instructions about words, letters and case."""

from __future__ import annotations

import re

from rollfeed.rewards.ifeval.arguments import ArgumentError, Arguments, holds, number, text, texts

WORD = re.compile(r"\w+")


def _num_occurrences(keyword: str, response: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(keyword)}(?!\w)", response, re.IGNORECASE))


def existence(response: str, arguments: Arguments) -> bool:
    """Every keyword occurs, be it as part of a word: plurals and other forms count."""
    return all(keyword.lower() in response.lower() for keyword in texts(arguments, "keywords"))


def frequency(response: str, arguments: Arguments) -> bool:
    """A keyword occurs as often as wanted, be it as part of a word."""
    count = response.lower().count(text(arguments, "keyword").lower())
    return holds(count, arguments, "frequency")


def forbidden_words(response: str, arguments: Arguments) -> bool:
    """No forbidden word occurs as a whole word."""
    return not any(_num_occurrences(word, response) for word in texts(arguments, "forbidden_words"))


def letter_frequency(response: str, arguments: Arguments) -> bool:
    """A letter or sign occurs as often as wanted, in either case."""
    letter = text(arguments, "letter")
    if len(letter) != 1:
        raise ArgumentError(f"letter = {letter!r:.60} must be one character")
    count = response.lower().count(letter.lower())
    return holds(count, arguments, "let_frequency", relation="let_relation")


def capital_word_frequency(response: str, arguments: Arguments) -> bool:
    """Words all in capitals occur as often as wanted."""
    count = sum(word.isupper() for word in re.findall(r"[\w'-]+", response))
    return holds(count, arguments, "capital_frequency", relation="capital_relation")


def english_capital(response: str, arguments: Arguments) -> bool:
    """All letters are capitals."""
    return response.isupper()


def english_lowercase(response: str, arguments: Arguments) -> bool:
    """No letter is a capital."""
    return response.islower()


def no_comma(response: str, arguments: Arguments) -> bool:
    """No comma occurs, in any script."""
    return not any(comma in response for comma in ",\u060c\u3001\uff0c")


def number_words(response: str, arguments: Arguments) -> bool:
    """The response has as many words as wanted."""
    return holds(len(WORD.findall(response)), arguments, "num_words")


def unique_words(response: str, arguments: Arguments) -> bool:
    """As many different words as wanted occur."""
    return holds(
        len({word.lower() for word in WORD.findall(response)}), arguments, "N" if "N" in arguments else "num_words"
    )


def number_count(response: str, arguments: Arguments) -> bool:
    """Exactly as many numbers as wanted occur."""
    found = re.findall(r"(?<![\w.])[0-9][0-9,]*(?:\.[0-9]+)?", response)
    return len(found) == number(arguments, "N" if "N" in arguments else "num_numbers")

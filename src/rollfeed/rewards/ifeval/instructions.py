"""The kinds of instruction, by the ids that data sets use."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollfeed.rewards.ifeval import layout, words
from rollfeed.rewards.ifeval.arguments import Arguments, Check
from rollfeed.rewards.ifeval.language import response_language

INSTRUCTIONS: Mapping[str, Check] = MappingProxyType(
    {
        "keywords:existence": words.existence,
        "keywords:frequency": words.frequency,
        "keywords:forbidden_words": words.forbidden_words,
        "keywords:letter_frequency": words.letter_frequency,
        "language:response_language": response_language,
        "length_constraints:number_sentences": layout.number_sentences,
        "length_constraints:number_paragraphs": layout.number_paragraphs,
        "length_constraints:number_words": words.number_words,
        "length_constraints:number_lines": layout.number_lines,
        "length_constraints:nth_paragraph_first_word": layout.nth_paragraph_first_word,
        "detectable_content:number_placeholders": layout.number_placeholders,
        "detectable_content:postscript": layout.postscript,
        "detectable_format:number_bullet_lists": layout.number_bullet_lists,
        "detectable_format:constrained_response": layout.constrained_response,
        "detectable_format:number_highlighted_sections": layout.number_highlighted_sections,
        "detectable_format:multiple_sections": layout.multiple_sections,
        "detectable_format:json_format": layout.json_format,
        "detectable_format:title": layout.title,
        "combination:two_responses": layout.two_responses,
        "combination:repeat_prompt": layout.repeat_prompt,
        "startend:start_checker": layout.start_checker,
        "startend:end_checker": layout.end_checker,
        "startend:quotation": layout.quotation,
        "change_case:capital_word_frequency": words.capital_word_frequency,
        "change_case:english_capital": words.english_capital,
        "change_case:english_lowercase": words.english_lowercase,
        "punctuation:no_comma": words.no_comma,
        "count:unique_words": words.unique_words,
        "count:numbers": words.number_count,
    }
)


def follows(response: str, instruction: str, arguments: Arguments) -> bool:
    """Whether a response follows an instruction; nothing follows one with an empty response or an unknown id."""
    check = INSTRUCTIONS.get(instruction)
    return check is not None and bool(response.strip()) and check(response, arguments)


def loose_forms(response: str) -> list[str]:
    """Return the response as it is, and without what models put around answers.

    Left out are the first line, the last line or both, each with and without asterisks.
    """
    lines = response.split("\n")
    parts = [lines, lines[1:], lines[:-1], lines[1:-1]]
    texts = ["\n".join(part).strip() for part in parts]
    return [form for text in texts for form in (text, text.replace("*", ""))]

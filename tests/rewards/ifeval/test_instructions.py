from __future__ import annotations

from typing import Any

import pytest

from rollfeed.rewards.ifeval.instructions import INSTRUCTIONS, ArgumentError, follows

POEM = "Rain falls on the roof. It sings! Does it stop?"
FRENCH = "Le chat est sur la table et il ne veut pas descendre dans le jardin avec les enfants."
ENGLISH = "The cat is on the table and it is not in the house."
RUSSIAN = "Это просто длинное предложение на русском языке, и вы его поняли."  # noqa: RUF001
GERMAN = "Der Hund ist im Garten und die Katze schläft auf dem Sofa, weil es regnet."

# Instruction, arguments, responses that follow it, responses that do not.
KINDS: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["rain", "roof"]}, [POEM, "rainy roofs"], ["Rain only", ""]),
    ("keywords:frequency", {"keyword": "ab", "frequency": 2, "relation": "at least"}, ["ab Ab"], ["ab", "ba ba"]),
    ("keywords:frequency", {"keyword": "ab", "frequency": 2, "relation": "less than"}, ["ab", "x"], ["ab ab", ""]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, ["The category."], ["The cat.", "CAT", ""]),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 2, "let_relation": "at least"}, ["Ee"], ["e"]),
    ("language:response_language", {"language": "fr"}, [FRENCH], [GERMAN, POEM, "123"]),
    ("language:response_language", {"language": "de"}, [GERMAN], [FRENCH, POEM]),
    ("language:response_language", {"language": "en"}, [ENGLISH], [FRENCH]),
    ("language:response_language", {"language": "ru"}, [RUSSIAN], [POEM]),
    ("language:response_language", {"language": "ja"}, ["これは日本語の文です。"], ["这是一句中文。", POEM]),
    ("language:response_language", {"language": "zh"}, ["这是一句中文。"], ["これは日本語の文です。", POEM]),
    ("language:response_language", {"language": "hi"}, ["यह हिंदी में एक वाक्य है।"], [POEM]),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"}, [POEM], ["One. Two."]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        ["Dr. Who is in."],
        ["One cat. Two dogs."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb"],
        ["a", "a\n***\n\n***\nb", "a***b***c"],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["one two three"], ["one two"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["one two"], ["one two three", ""]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "exactly"}, ["one two three"], ["one two"]),
    ("length_constraints:number_lines", {"num_lines": 2, "relation": "at most"}, ["a\n\nb"], ["a\nb\nc"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        ["First.\n\nThen, second.", 'First.\n\n"Then" it.'],
        ["Then.\n\nFirst.", "Then."],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[name] at [place]"], ["[name]", "[]"]),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye.\nP.S. Me too", "x\np.s. y"],
        ["Bye.", "see P.S. x"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["Bye.\nP.P.S Me"], ["Bye.\nP.S. Me"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n* b", "- a\n- b"], ["* a", "**bold**\n* a"]),
    ("detectable_format:constrained_response", {}, ["My answer is yes.", "Well. My answer is maybe."], ["Yes."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* and **b**"], ["*a*", "* a\n* b"]),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2"],
        ["Section 1", "one Section 1 Section 2"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"k": [1]}', '```json\n{"k": 1}\n```', "```\n[1]\n```"],
        ["{k: 1}", "x {}", "```json\n{"],
    ),
    ("detectable_format:title", {}, ["<<On rain>>\nIt rains."], ["<On rain>", "<< >>", "<<\n>>"]),
    ("combination:two_responses", {}, ["one\n******\ntwo"], ["one", "one\n******\none", "one\n***\ntwo"]),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a poem."},
        ["Write a poem. Rain."],
        ["Sure. Write a poem."],
    ),
    ("startend:start_checker", {"start_phrase": "Dear"}, ["Dear all"], ["Hi, Dear all"]),
    ("startend:end_checker", {"end_phrase": "The end."}, ["So. The end.", 'So. the end."'], ["The end. Or not?"]),
    ("startend:quotation", {}, ['"All of it"'], ['"Part" of it', '"']),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["A BIG cat"],
        ["A cat"],
    ),
    ("change_case:english_capital", {}, ["ALL CAPITALS 1!"], ["This Is Title Case", "1 2 3"]),
    ("change_case:english_lowercase", {}, ["all small"], ["All small", "1 2 3"]),
    ("punctuation:no_comma", {}, ["no such sign"], ["a, b", "a\uff0c b", ""]),
    ("count:unique_words", {"num_words": 2, "relation": "at least"}, ["a b b"], ["a A a"]),
    ("count:numbers", {"num_numbers": 2}, ["1 and 2.5"], ["1", "1 2 3"]),
]


def test_at_least_twenty_kinds_are_known_and_all_are_tried_here() -> None:
    assert len(INSTRUCTIONS) >= 20
    assert {name for name, *_ in KINDS} == set(INSTRUCTIONS)


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), KINDS)
def test_instruction_tells_who_follows_it(
    name: str, arguments: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert [response for response in good if not follows(response, name, arguments)] == []
    assert [response for response in bad if follows(response, name, arguments)] == []


@pytest.mark.parametrize("name", sorted(INSTRUCTIONS))
def test_empty_response_follows_nothing(name: str) -> None:
    assert not follows("", name, {})
    assert not follows(" \n", name, {})


def test_unknown_instruction_is_not_followed() -> None:
    assert not follows("Any text.", "keywords:must_be_nice", {})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("keywords:existence", {}),
        ("keywords:existence", {"keywords": "rain"}),
        ("keywords:letter_frequency", {"letter": "ab", "let_frequency": 1}),
        ("length_constraints:number_words", {"num_words": "3"}),
        ("length_constraints:number_words", {"num_words": 3, "relation": "about"}),
        ("language:response_language", {"language": "tlh"}),
        ("combination:repeat_prompt", {}),
        ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 1, "nth_paragraph": 0, "first_word": "a"}),
    ],
)
def test_missing_or_wrong_arguments_are_told(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        follows("Some text.", name, arguments)


@pytest.mark.parametrize("piece", ["*", "a. ", "[", "<<", "- ", "*a", "\n***", "```", "P.S", '"', "1,"])
@pytest.mark.parametrize("name", sorted(INSTRUCTIONS))
def test_long_repetitions_are_checked(name: str, piece: str) -> None:
    arguments = next(arguments for kind, arguments, *_ in KINDS if kind == name)
    follows(piece * (30_000 // len(piece)), name, arguments)

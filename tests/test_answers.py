from __future__ import annotations

import random
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfeed.answers import (
    MAX_CHARS,
    Mark,
    after_reasoning,
    clean,
    find_answer,
    find_box,
    find_claimed_number,
    find_code,
    find_numbers,
    find_quoted,
    normalize,
    without_end_token,
)


@pytest.mark.parametrize(
    ("response", "text", "mark"),
    [
        (r"so \boxed{42}.", "42", Mark.BOXED),
        (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}", Mark.BOXED),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", Mark.BOXED),
        (r"first \boxed{4}, then \boxed{6}", "6", Mark.BOXED),
        (r"\boxed{\boxed{5}}", "5", Mark.BOXED),
        (r"<answer>\boxed{5}</answer>", "5", Mark.BOXED),
        ("<answer>4</answer> no, <ANSWER> 6</ANSWER>", " 6", Mark.TAG),
        ("<answer><answer>6</answer></answer>", "6", Mark.TAG),
        ("Answer: Paris\nIt is a city.", "Paris", Mark.LINE),
        ("**Answer:** 42", "42", Mark.LINE),
        ("Final answer:\n\n  42", "42", Mark.LINE),
        ("The answer is **Paris**.", "Paris", Mark.LINE),
        ("Answer: 3\nAnswer: 4", "4", Mark.LINE),
        ("Answer：４２", "42", Mark.LINE),  # noqa: RUF001
        ("I think\n\nit is Paris\n", "it is Paris", Mark.LAST_LINE),
        ("<think>Answer: 3</think>\nParis", "Paris", Mark.LAST_LINE),
        ("<think>a</think>\\boxed{3}<think>b</think>\\boxed{5}", "5", Mark.BOXED),
        ("Paris <think>or Rome", "Paris", Mark.LAST_LINE),
    ],
)
def test_answer_is_the_last_marked_part(response: str, text: str, mark: Mark) -> None:
    answer = find_answer(response)
    assert answer is not None
    assert (answer.text.rstrip(), answer.mark) == (text, mark)


@pytest.mark.parametrize(
    "response",
    [
        "",
        " \n\t",
        "<think>still at it, maybe \\boxed{4}",
        r"\boxed{}",
        "<answer> </answer>",
        "Answer:",
        r"\boxed{\frac{1}{2}",
        r"\boxed{4} and \boxed{5",
    ],
)
def test_empty_or_unfinished_response_has_no_answer(response: str) -> None:
    assert find_answer(response) is None


def test_raw_fallback_is_the_whole_text() -> None:
    assert find_answer("a\nb", fallback=Mark.RAW).text == "a\nb"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("42", ["42"]),
        ("1,234 and 12,345,678", ["1234", "12345678"]),
        ("12,34", ["12", "34"]),
        ("-5 or −5 or –5", ["-5", "-5", "-5"]),  # noqa: RUF001
        ("10-5", ["10", "5"]),
        ("x=-5", ["-5"]),
        ("3.50", ["7/2"]),
        (".5", ["1/2"]),
        ("3/4", ["3/4"]),
        ("1 1/2", ["3/2"]),
        ("1½", ["3/2"]),
        (r"-\frac{3}{4} and 2\dfrac{1}{2}", ["-3/4", "5/2"]),
        ("5/0", []),
        ("10² and 10^{2} and 2^3", []),
        ("$1,234.50", ["2469/2"]),
        (r"\$18.50", ["37/2"]),
        (r"10\,000 and 1,\!024 and 1{,}234", ["10000", "1024", "1234"]),
        ("1\u202f234", ["1234"]),
        ("90^\\circ", ["90"]),
        ("1e3", ["1000"]),
        ("1e9999", []),
        ("version 3.14.15 of 1/2/2020", []),
        ("v2 x42", []),
        ("42kg, 50%", ["42", "50"]),
        ("６", ["6"]),  # noqa: RUF001
        ("is...42.", ["42"]),
        ("9" * 2_000, []),
    ],
)
def test_numbers_are_read_exactly(text: str, numbers: list[str]) -> None:
    assert find_numbers(normalize(text)) == [Fraction(number) for number in numbers]


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("3 + 4 = 7", 7),
        ("The sum of 3 and 4 is 7.", 7),
        ("13\n\nYou could do it in other ways.", 13),
        ("The answer is 9. The equation 3 + 6 can be solved.", 9),
        ("The answer is 42 because 42 is larger than 17.", 42),
        ("Answer: 3, 5", None),
        ("3, 5, 42", None),
        ("The numbers are: 3, 5, 42", None),
        ("none", None),
    ],
)
def test_list_of_numbers_claims_none(response: str, number: int | None) -> None:
    assert find_claimed_number(response) == number


def test_numbers_of_the_question_are_not_claimed() -> None:
    assert find_claimed_number("3 and 4 make 7, so 3 + 4 is 7 indeed", given=[3, 4]) == 7
    assert find_claimed_number("3 and 4", given=[3, 4]) is None


@pytest.mark.parametrize(
    "text", ["Paris", " Paris. ", '"Paris."', "**Paris**", "`Paris`", "\u201cParis\u201d.", "$Paris$"]
)
def test_clean_takes_off_what_is_around_the_answer(text: str) -> None:
    assert clean(text) == "Paris"


def test_clean_leaves_something_of_everything() -> None:
    assert clean("...") == ".."
    assert clean("**") == "**"


def test_quoted_parts_do_not_go_over_a_line() -> None:
    assert find_quoted('"a b" and \u201cc\u201d, "d\ne"') == ["a b", "c"]


def test_combining_marks_are_composed_but_endless_ones_left_alone() -> None:
    assert normalize("e\u0301") == "\u00e9"
    assert normalize("e" + "\u0301" * 500) == "e" + "\u0301" * 500


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{a \{ b}", r"a \{ b"),
        (r"\boxed{x \\ y}", r"x \\ y"),
        (r"\boxed{a}} and {", "a"),
        (r"\fbox{a}", "a"),
        (r"\\boxed{a}", "a"),
        (r"\boxed", None),
        (r"\boxed 5", None),
        (r"\boxed{a", ""),
        (r"\boxed{a} \boxed{b", ""),
        (r"\boxed{" * 500 + "a" + "}" * 500, "a"),
    ],
)
def test_box_is_the_last_one_with_balanced_braces(text: str, box: str | None) -> None:
    assert find_box(text) == box


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx\n```\nthen\n```py\ny\n```\nbye", "y\n"),
        ("~~~\nx\n~~~", "x\n"),
        ("````md\n```\nx\n````", "```\nx\n"),
        ("```python\nx = 1", None),
        ("```python\nx\n```\n```python\ny", None),
        ("```python\nx\n```python\ny\n```", "y\n"),
        ("no code", None),
        ("inline ```x``` only", None),
        ("<think>```\nx\n```</think> none", None),
        ("<think>```\nx\n```", None),
    ],
)
def test_code_is_the_last_fenced_block(response: str, code: str | None) -> None:
    assert find_code(response) == code


def test_code_is_left_as_it_is() -> None:
    assert find_code("```\ns = '\uff16\ud83d'\n```") == "s = '\uff16\ud83d'\n"


def test_only_the_end_of_a_response_is_read() -> None:
    assert find_answer(r"\boxed{5}" + " " * MAX_CHARS) is None
    assert after_reasoning("a" * 2 * MAX_CHARS) == "a" * 2 * MAX_CHARS


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("\uff0d\u2013\u2014\u2212", "----"),
        ("x\u207b\u00b9\u00b2", "x^-12"),
        ("x\u207f\u207a\u00b9", "x^{n+1}"),
        ("1011\u2082, x\u2081y\u2081", "1011_2, x_1y_1"),
        ("H\u2082O and CO\u2082", "H2O and CO2"),
        ("90\u00ba \u211d", "90\u00b0 \\mathbb{R}"),
        ("\u0664\u0662", "42"),
        ("\uff12\u00bd", "2 1/2"),
        ("4\u200b2\ufeff", "42"),
        ("\ud83d", "\ufffd"),
    ],
)
def test_signs_of_other_scripts_become_plain(text: str, normal: str) -> None:
    assert normalize(text) == normal


PIECES = [
    r"\boxed{",
    "{",
    "}",
    "<answer>",
    "</answer>",
    "Answer: ",
    "answer ",
    "answer is ",
    "```\n",
    "<think>",
    "</think>",
]


def num_lines_run(function: Callable[[str], Any], text: str) -> int:
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        if "rollfeed" not in frame.f_globals["__name__"]:  # callbacks of the garbage collector
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(text)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("piece", [*PIECES, "a", " ", "\\", "\u00e9", "\u0301", r"\boxed{5} ", "* ", "answer   "])
@pytest.mark.parametrize("function", [find_answer, find_code, find_box])
def test_work_grows_linearly_with_the_text(function: Callable[[str], Any], piece: str) -> None:
    num_pieces = MAX_CHARS // (4 * len(piece))
    short, middle, long = (num_lines_run(function, piece * (num_pieces * factor)) for factor in (1, 2, 4))
    per_piece = (middle - short) / num_pieces
    assert long - middle <= 2 * num_pieces * (per_piece + 1)
    assert long <= 20 * MAX_CHARS


ALPHABET = [*PIECES, *"5 \n\\$*_`.~", "\ud83d", "\u0301", "\u00bd", "\uff16", "\u2212", "\x00", "\U0001f600"]


def test_extractor_never_raises() -> None:
    generator = random.Random(0)
    for _ in range(3_000):
        response = "".join(generator.choices(ALPHABET, k=generator.randrange(60)))
        answer = find_answer(response)
        assert answer is None or answer.text.strip(), response
        find_box(response)
        find_code(response)


@given(st.text() | st.text(alphabet='0123456789.,-/ \n{}\\"<>=:eEanswer^$'))
def test_nothing_raises_on_any_text(response: str) -> None:
    for fallback in (Mark.LAST_LINE, Mark.RAW):
        answer = find_answer(response, fallback=fallback)
        if answer is not None:
            assert answer.text.strip()
            assert clean(answer.text)
    find_claimed_number(response)
    find_quoted(response)


@pytest.mark.parametrize("end", ["<|im_end|>", "</s>", "<end>", "<\uff5cend\u2581of\u2581sentence\uff5c>"])
def test_the_token_that_ended_a_response_is_no_part_of_it(end: str) -> None:
    assert without_end_token(f"4 < 5{end}") == "4 < 5"

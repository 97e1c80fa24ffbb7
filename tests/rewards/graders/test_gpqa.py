from __future__ import annotations

from typing import Any

import pytest

from rollfeed.rewards.registry import BUILTIN_GRADERS
from rollfeed.types import Outcome

CASES: list[tuple[str, Any, int, dict[str, Any]]] = [
    ("It is not B, the answer is D.", "D", 1, {}),
    ("ANSWER IS D. A is incorrect.", "D", 1, {}),
    ("The answer is A magnet.", "A", 0, {}),
    ("The answer is A.", "A", 1, {}),
    ("The answer is A because a magnet", "A", 1, {}),
    ("The answer choice is B", "B", 1, {}),
    ("The correct answer does not include D; so B", "B", 1, {}),
    ("The answer is (b).", "B", 1, {}),
    ("answer: b", "B", 1, {}),
    ("I choose C", "C", 1, {}),
    ("B", "B", 1, {}),
    ("(B)", "B", 1, {}),
    ("**B**", "B", 1, {}),
    ("B.", "B", 1, {}),
    ("B) Paris", "B", 1, {}),
    ("Answer: A or B", "A", 0, {}),
    ("A, B, C, D", "D", 0, {}),
    ("Both A and B are close. Final answer: $\\boxed{\\text{C}}$", "C", 1, {}),
    ("The answer is not A", "A", 0, {}),
    ("The answer is Paris", "B", 1, {"choices": ["Rome", "Paris", "Oslo", "Bern"]}),
    ("The answer is Paris, not Rome", "B", 0, {"choices": ["Rome", "Paris", "Oslo", "Bern"]}),
    ("I think it's Paris.", "B", 1, {"choices": ["Rome", "Paris", "Oslo", "Bern"]}),
    ("R\xe9ponse : B", "B", 1, {}),
    ("\u7b54\u6848: C", "C", 1, {}),
    ("Option D is correct.", "D", 1, {}),
    ("The correct option is: D", "D", 1, {}),
    ("A is wrong. B is wrong. D is wrong. C is the answer", "C", 1, {}),
    ("Antwort:\n\nAntwort: C", "C", 1, {}),
    ("So the final answer is option (D) Mars.", "D", 1, {}),
    ("Answer: B\n\nA good choice comes next.", "B", 1, {}),
    ("The answer is C, although A is tempting.", "C", 1, {}),
    ("Answer: I", "I", 1, {"valid_letters": ["A", "B", "C", "D", "E", "F", "G", "H", "I", "J"]}),
    ("Therefore, I would go with B.", "B", 1, {}),
    ("The answer is clearly D", "D", 1, {}),
    ("choice c", "C", 0, {}),
    ("Answer:\nD", "D", 1, {}),
    ("**Answer:** D", "D", 1, {}),
    ("Answer - D", "D", 1, {}),
    ("\\boxed{D}", "D", 1, {}),
    ("\\boxed{(D)}", "D", 1, {}),
    ("\\boxed{D. 42}", "D", 1, {}),
    ("\\boxed{D=5}", "D", 0, {}),
    ("Answer: D) 42", "D", 1, {}),
    ("Answer: A", 0, 1, {}),
    ("The answer is definitely not C but D.", "D", 1, {}),
    ("Answer: [D]", "D", 1, {}),
    ("My choice is D.", "D", 1, {}),
    ("the answer isn't B", "B", 0, {}),
    ("Answer: None of the above", "D", 0, {}),
    ("The answer might be B", "B", 1, {}),
    ("Answer\uff1aB", "B", 1, {}),
    ("Answer: \uff22", "B", 1, {}),
    ("Answer: \\(C\\)", "C", 1, {}),
    ("I am sure. A", "A", 1, {}),
    ("I don't know", "I", 0, {"valid_letters": ["A", "B", "C", "D", "E", "F", "G", "H", "I", "J"]}),
    ("The answer is D</s>", "D", 1, {}),
    ("Answer: D is right", "D", 1, {}),
    ("answer is\n\n**D**", "D", 1, {}),
    ("The answer seems subtle here.\n\nAnswer: A", "A", 1, {}),
    ("My choice comes down to kinetics.\nAnswer: A", "A", 1, {}),
    ("Actually, this one is tricky and no pick was made.", "A", 0, {}),
    ("Error: rate limited", "A", 0, {}),
    (
        "The answer is C because I computed it.",
        "C",
        1,
        {"valid_letters": ["A", "B", "C", "D", "E", "F", "G", "H", "I", "J"]},
    ),
    ("We get \\boxed{\\langle H\\rangle \\ll \\Delta E}.\n**Answer: D**", "D", 1, {}),
    ("Answer: $\\mathbf{C}$", "C", 1, {}),
    ("<think>Maybe the answer is A.</think>The answer is C.", "C", 1, {}),
    ("<think>The answer is A.", "A", 0, {}),
    ("Answer: E", "A", 0, {}),
    ("", "A", 0, {}),
    ("Answer: B", "(B)", 1, {}),
    ("Answer: B", "Paris", 1, {"choices": ["Rome", "Paris", "Oslo", "Bern"]}),
    ("Answer: B", 1, 1, {}),
    ("Answer: B", 2, 0, {}),
    ("Answer: B", "x", 1, {"correct_letter": "B"}),
    ("Paris", "Paris", 1, {}),
    ("Answer: Paris", "B", 1, {"choices": {"A": "Rome", "B": "Paris"}}),
    # Several letters are no choice, whatever stands between them.
    *[
        (form.format(separator.join("ABCD")), label, 0, {})
        for form in ("{}", "Answer: {}", "\\boxed{{{}}}", "<answer>{}</answer>", "The answer is {}.")
        for separator in (";", "; ", ",", "/", " ", ". ", "-", "+", "|", " and ", ": ", ") ")
        for label in "AD"
    ],
    ("**A**;**B**", "A", 0, {}),
    ("Answer: (A)\n\nB is wrong, as it is large.", "A", 1, {}),
    ("Answer: A - I think", "A", 1, {}),
    ("The answer is A. B is wrong.", "A", 1, {}),
]


@pytest.mark.parametrize(("response", "label", "expected", "metadata"), CASES)
def test_chosen_option_is_graded(response: str, label: Any, expected: int, metadata: dict[str, Any]) -> None:
    assert (
        BUILTIN_GRADERS["gpqa"](response, label, {"valid_letters": ["A", "B", "C", "D"], **metadata}).reward == expected
    )


@pytest.mark.parametrize("label", [None, "", 7, {}, True])
def test_label_that_names_no_option_is_an_error(label: Any) -> None:
    assert BUILTIN_GRADERS["gpqa"]("Answer: A", label, {}).outcome is Outcome.ERROR


@pytest.mark.parametrize(
    "piece", ["*", " ", "\n", "answer ", "answer: ", "(", "A ", "\\text{", "so ", "*\n", "Answer: **"]
)
def test_long_repetitions_are_graded(piece: str) -> None:
    assert BUILTIN_GRADERS["gpqa"](piece * (20_000 // len(piece)) + "\nAnswer: C", "C", {}).reward == 1.0

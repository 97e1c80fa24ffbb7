"""Nothing large is ever made from a small text."""

from __future__ import annotations

import pytest

from rollfeed.rewards.equality import Equality, compare
from rollfeed.rewards.equality.complexity import check_complexity
from rollfeed.rewards.equality.notation import read
from rollfeed.rewards.equality.numeric import compare_numerically
from rollfeed.rewards.equality.tree import TooComplexError

EXPLOSIVE = [
    "9**9**9",
    "9^{9^{9}}",
    "5^{5^{5^{5}}}",
    r"\frac{7^{7^{7^{7}}}-1}{6}",
    r"\dfrac{7^{\left(7^{\left(7^{7}\right)}-3\right)}-7}{12}",
    "2^{2^{2^{2^{2^{2}}}}}",
    "99999999!",
    "((9!)!)!",
    "0.9^{10^{9}}",
    "(x+1)^{10^{12}}",
    r"\exp(10^{30})",
    r"\binom{10^{9}}{10^{8}}",
    r"x^{10^{50}}",
    "10^{-10^{10}}",
]
LONG = [
    "(" * 3_000 + "x" + ")" * 3_000,
    "(" * 500 + "x" + ")" * 500,
    r"\sqrt{" * 300 + "2" + "}" * 300,
    r"\sin" * 400 + "x",
    "2^" * 700 + "2",
    "-" * 1_900 + "1",
    "5" + "!" * 500,
    r"\frac" * 300,
    "9" * 20_000,
    "9" * 1_500,
    "1e99999",
]


@pytest.mark.parametrize("text", EXPLOSIVE)
def test_explosive_expression_is_refused_before_it_is_evaluated(text: str) -> None:
    with pytest.raises(TooComplexError):
        check_complexity(read(text)[0])


@pytest.mark.parametrize("text", EXPLOSIVE + LONG)
@pytest.mark.parametrize("label", [r"\frac{1}{3}", "x+y", "42"])
def test_answer_over_the_limits_is_different_from_any_small_one(text: str, label: str) -> None:
    assert compare(text, label, undecided=compare_numerically) is Equality.DIFFERENT
    assert compare(label, text, undecided=compare_numerically) is Equality.DIFFERENT


@pytest.mark.parametrize("text", EXPLOSIVE + LONG)
def test_answer_over_the_limits_equals_itself(text: str) -> None:
    assert compare(text, text) is Equality.EQUAL
    assert compare(text, f" {text} ") is Equality.EQUAL


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__.__base__.__subclasses__()",
        "[[__import__('os').getpid()]]",
        r"2\pi*(1).__class__",
        r"\text{__import__('os').getcwd()}",
        "lambda: 0",
        "open('/etc/passwd')",
        "@user 1276915 \u589e\u9ad8 \uad8c\uad6d {1,1-3-10\u9f13\u52b1);5_GENERAL2 }",
    ],
)
def test_code_and_garbage_are_text(text: str) -> None:
    for label in (r"\frac{1}{2}", r"2\pi", r"\begin{pmatrix}1\end{pmatrix}", "1"):
        assert compare(text, label, undecided=compare_numerically) is Equality.DIFFERENT
    assert compare(text, text) is Equality.EQUAL

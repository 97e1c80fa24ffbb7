from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from rollfeed.rewards.equality import Equality, compare
from rollfeed.rewards.equality.notation import read
from rollfeed.rewards.equality.numeric import compare_numerically
from rollfeed.rewards.equality.tree import NotMathError, TooComplexError

INTEGERS = st.integers(-(10**50), 10**50)
NOTATION = (
    r"\frac \sqrt { } ( ) [ ] ^ _ ! % + - * / = < > , . 0 1 2 12 999 1,234 0.5 1e5 x y n e i \pi \sin \ln | & \\ "
    r"\begin{pmatrix} \end{pmatrix} \{ \} \text{cm} \pm \infty \cup \left( \right) ' : ; \in \$ \% \circ \binom "
    r"\overline{3} 2^{ apples or and cm"
)
PIECES = st.sampled_from([*NOTATION.split(), " ", r"\text{ or }"])
SOUP = st.lists(PIECES, max_size=12).map("".join)


def unary(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    forms = st.sampled_from([r"\sqrt{%s}", "-%s", "(%s)", "(%s)^2", r"\sin(%s)", "|%s|", r"\frac{1}{%s}", "(%s)!"])
    return st.builds(lambda form, text: form % text, forms, inner)


def binary(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    forms = st.sampled_from(
        [r"\frac{%s}{%s}", "%s+%s", "%s-%s", "(%s)(%s)", "(%s,%s)", "[%s,%s)", r"\{%s,%s\}", "%s=%s"]
    )
    return st.builds(lambda form, left, right: form % (left, right), forms, inner, inner)


LEAVES = st.integers(0, 200).map(str) | st.sampled_from(["x", "y", r"\pi", "0.25", "3 1/2", r"50\%", "i", "12 cm"])
EXPRESSIONS = st.recursive(LEAVES, lambda inner: unary(inner) | binary(inner), max_leaves=6)


@given(INTEGERS, INTEGERS)
@settings(max_examples=500, deadline=None)
def test_integers_are_equal_exactly_when_they_are_the_same(left: int, right: int) -> None:
    expected = Equality.EQUAL if left == right else Equality.DIFFERENT
    assert compare(str(left), str(right)) is expected
    assert compare(f"{left:,}", str(right)) is expected
    assert compare(f"x = {left}", str(right)) is expected


@given(INTEGERS, st.integers(-3, 3))
@settings(max_examples=300, deadline=None)
def test_neighbouring_integers_are_different_in_every_spelling(number: int, step: int) -> None:
    expected = Equality.EQUAL if step == 0 else Equality.DIFFERENT
    other = number + step
    for spelling in (
        f"{other}.0",
        f"{other:,}",
        f"{other:,}".replace(",", r"\,"),
        rf"\frac{{{2 * other}}}{{2}}",
        rf"\text{{{other}}}",
        f"{other} cm",
        rf"{other}\%",
        rf"\${other}",
        rf"{{{other}}}",
        f"\u2212{-other}" if other < 0 else f"+{other}",
    ):
        assert compare(spelling, str(number), undecided=compare_numerically) is expected, spelling


@given(st.integers(1, 10**50), st.integers(-3, 3))
@settings(max_examples=100, deadline=None)
def test_numbers_that_need_many_digits_are_told_apart(number: int, step: int) -> None:
    expected = Equality.EQUAL if step == 0 else Equality.DIFFERENT
    for form in (r"\sqrt{%d}+\pi", r"\ln(%d)", r"\frac{1}{%d}+e", r"\pi^2-%d"):
        assert compare(form % (number + step + 3), form % (number + 3), undecided=compare_numerically) is expected, form


@given(st.fractions(), st.fractions())
@settings(max_examples=300, deadline=None)
def test_fractions_are_compared_by_value(left: Fraction, right: Fraction) -> None:
    expected = Equality.EQUAL if left == right else Equality.DIFFERENT
    unreduced = rf"\frac{{{3 * right.numerator}}}{{{3 * right.denominator}}}"
    assert compare(f"{left.numerator}/{left.denominator}", unreduced) is expected


@given(SOUP | EXPRESSIONS)
@settings(max_examples=400, deadline=None)
def test_what_can_be_read_equals_itself(text: str) -> None:
    try:
        read(text)
    except (NotMathError, TooComplexError):
        return
    assert compare(text, text) is Equality.EQUAL


@given(EXPRESSIONS, EXPRESSIONS)
@settings(max_examples=400, deadline=None)
def test_equality_is_symmetric_on_expressions(left: str, right: str) -> None:
    assert compare(left, right) is compare(right, left)


@given(EXPRESSIONS, EXPRESSIONS)
@settings(max_examples=40, deadline=None)
def test_equality_by_numbers_is_symmetric(left: str, right: str) -> None:
    there, back = (compare(*pair, undecided=compare_numerically) for pair in ((left, right), (right, left)))
    assert there is back


@given(SOUP, SOUP)
@settings(max_examples=400, deadline=None)
def test_equality_is_symmetric_on_anything(left: str, right: str) -> None:
    assert compare(left, right) is compare(right, left)


@given(EXPRESSIONS)
@settings(max_examples=300, deadline=None)
def test_doubling_and_halving_changes_nothing(text: str) -> None:
    if any(sign in text for sign in "=[,") or r"\{" in text or "cm" in text or r"\%" in text:
        return
    assert compare(rf"\frac{{2({text})}}{{2}}", text) is not Equality.DIFFERENT or _is_undefined(text)


def _is_undefined(text: str) -> bool:
    """Whether a division by zero or a limit of size keeps an expression from having a value."""
    return compare(f"({text})+0", text) is Equality.DIFFERENT


@given(st.text())
@settings(max_examples=500, deadline=None)
def test_any_text_is_compared_without_raising(text: str) -> None:
    compare(text, "5")
    compare("x+1", text)

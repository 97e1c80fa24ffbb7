"""Whether two answers are mathematically equal, in stages: the cheapest first, each exact.

1. Text: two spellings of one formula, or the same words.
2. Structure: lists, tuples, intervals, sets, matrices, equations and inequalities, member by member.
3. Scalars: rationals without floats, then polynomials multiplied out.
4. What is left is UNDECIDED: ``numeric`` tries numbers, in a worker.

Before anything is evaluated the size of every number in it is bounded, see ``complexity``.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import TypeAlias

from rollfeed.rewards.equality.complexity import check_complexity
from rollfeed.rewards.equality.exact import exact_value
from rollfeed.rewards.equality.normal_form import NormalForms, UndefinedError, has_infinity
from rollfeed.rewards.equality.notation.parser import read
from rollfeed.rewards.equality.structure import compare_structures
from rollfeed.rewards.equality.tree import Apply, Equality, Node, NotMathError, Number, Quantity, TooComplexError, walk
from rollfeed.rewards.equality.wording import formula_key, without_markdown, words_key

CompareScalars: TypeAlias = Callable[[Node, Node], Equality]

_HUNDRED = Number(Fraction(100))


def compare(answer: str, label: str, *, undecided: CompareScalars | None = None) -> Equality:
    """Compare two answers.

    ``undecided`` decides scalars that exact means do not; without it they are UNDECIDED.

    Returns:
        DIFFERENT as well for texts that only differ as formulas over a limit of complexity.
    """
    answer, label = without_markdown(answer), without_markdown(label)
    key, label_key = formula_key(answer), formula_key(label)
    if not key or not label_key:
        return Equality.DIFFERENT
    if key == label_key:
        return Equality.EQUAL
    words, label_words = words_key(answer), words_key(label)
    if words is not None and words == label_words:
        return Equality.EQUAL
    try:
        readings, label_readings = read(answer), read(label)
    except (NotMathError, TooComplexError):
        return Equality.DIFFERENT
    scalars = _Scalars(undecided)
    found = Equality.DIFFERENT
    for reading in readings:
        for label_reading in label_readings:
            match _compare_trees(reading, label_reading, scalars):
                case Equality.EQUAL:
                    return Equality.EQUAL
                case Equality.UNDECIDED:
                    found = Equality.UNDECIDED
    return found


def _compare_trees(left: Node, right: Node, scalars: _Scalars) -> Equality:
    if left == right:
        return Equality.EQUAL
    try:
        check_complexity(left)
        check_complexity(right)
        return compare_structures(left, right, scalars)
    except (NotMathError, TooComplexError, UndefinedError):
        return Equality.DIFFERENT


class _Scalars:
    """Compares values that have no structure."""

    def __init__(self, undecided: CompareScalars | None) -> None:
        self._undecided = undecided
        self._forms = NormalForms()

    def __call__(self, left: Node, right: Node) -> Equality:
        if left == right:
            return Equality.EQUAL
        verdict = self._compare(left, right)
        if verdict is Equality.DIFFERENT and _has_percent(left) is not _has_percent(right):
            # 50% is 0.5, and by the convention of school books 50 as well.
            return self._compare(_percent_as_hundredths(left), _percent_as_hundredths(right))
        return verdict

    def up_to_a_factor(self, left: Node, right: Node) -> Equality:
        return self._forms.compare_up_to_a_factor(left, right)

    def _compare(self, left: Node, right: Node) -> Equality:
        unit, other = _unit(left), _unit(right)
        if unit and other and unit != other:
            return Equality.DIFFERENT
        if isinstance(left, Quantity) and isinstance(right, Quantity):
            return self(left.value, right.value)
        a, b = exact_value(left), exact_value(right)
        if a is not None and b is not None:
            return Equality.EQUAL if a == b else Equality.DIFFERENT
        if has_infinity(left) or has_infinity(right):
            return _compare_infinities(left, right)
        verdict = self._forms.compare(left, right)
        if verdict is Equality.UNDECIDED and self._undecided is not None:
            return self._undecided(left, right)
        return verdict


def _compare_infinities(left: Node, right: Node) -> Equality:
    def sign(node: Node) -> int:
        if isinstance(node, Apply) and node.function == "negate" and len(node.arguments) == 1:
            return -sign(node.arguments[0])
        return 1 if has_infinity(node) and not isinstance(node, Apply) else 0

    return Equality.EQUAL if sign(left) == sign(right) != 0 else Equality.DIFFERENT


def _unit(node: Node) -> str:
    match node:
        case Quantity(unit=unit):
            return unit
        case Apply(function="percent"):
            return "percent"
        case Apply(function="negate" | "multiply", arguments=(*_, value)):
            return _unit(value)
        case _:
            return ""


def _has_percent(node: Node) -> bool:
    return any(
        (isinstance(part, Apply) and part.function == "percent")
        or (isinstance(part, Quantity) and part.unit == "percent")
        for part in walk(node)
    )


def _percent_as_hundredths(node: Node) -> Node:
    match node:
        case Apply(function="percent", arguments=(value,)) | Quantity(value=value, unit="percent"):
            return Apply("divide", (value, _HUNDRED))
        case Apply(function="negate", arguments=(value,)):
            return Apply("negate", (_percent_as_hundredths(value),))
        case _:
            return node

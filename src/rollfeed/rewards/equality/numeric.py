"""Equality by high-precision numbers, for what exact means do not decide. Runs in a worker process.

Two expressions are taken to be equal when they agree to at least 80 digits at several points. The precision grows with
the size of the numbers in them. Where both are real decides; a point where one is undefined decides nothing. What is
made of pieces, such as absolute values and maxima, is looked at on further points, see ``pieces``. All of it has a
budget of processor time: what is over it is not equal, as it is no fault of the machine's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath

from rollfeed.rewards.equality.compare import compare
from rollfeed.rewards.equality.complexity import check_complexity
from rollfeed.rewards.equality.pieces import further_points, has_pieces
from rollfeed.rewards.equality.tree import (
    Apply,
    Constant,
    Equality,
    Node,
    NotMathError,
    Number,
    Quantity,
    Symbol,
    TooComplexError,
    walk,
)

_AGREEING_DIGITS = 80
MAX_CPU_SECONDS = 1.0
"""Of all comparisons of an answer; an ordinary one takes a hundredth."""
_MAX_EXTRA_DIGITS = 3_000
_MAX_LOG_MAGNITUDE = 100_000
# mpmath's precision is one for the whole process.
_PRECISION = threading.Lock()
# Positive and negative rationals without pattern; each variable gets another shift of them.
_POINTS = (Fraction(7919, 6133), Fraction(3571, 9533), Fraction(-4409, 7127), Fraction(2203, 877), Fraction(-911, 353))

# Large enough for (n - 20)!, of which the values at other points take long.
_INTEGER_POINTS = (Fraction(29), Fraction(43), Fraction(37), Fraction(59), Fraction(71))
_OF_INTEGERS = ("factorial", "binom")
_MAX_DIGITS_OF_GAMMA = 300


def compare_numerically(left: Node, right: Node) -> Equality:
    """Compare two expressions at several points; DIFFERENT when they are defined together nowhere.

    DIFFERENT as well when they agree, but numbers in them are so large that a difference may go unseen.

    Raises:
        TooComplexError: If a number in one is too large to handle.
    """
    parts = [part for node in (left, right) for part in walk(node)]
    names = sorted({part.name for part in parts if isinstance(part, Symbol)})
    has_factorials = any(isinstance(part, Apply) and part.function in _OF_INTEGERS for part in parts)
    wanted = int(check_complexity(left) + check_complexity(right)) * (4 if has_factorials and names else 1)
    extra = min(wanted, _MAX_EXTRA_DIGITS)
    points = _INTEGER_POINTS if has_factorials else _POINTS
    is_real = bool(names) and Constant("i") not in parts
    with _PRECISION, mpmath.workdps(2 * _AGREEING_DIGITS + 2 * extra):
        tolerance = mpmath.mpf(10) ** -(_AGREEING_DIGITS + extra)
        agreed = 0
        for shift, point in enumerate(points if names else points[:1]):
            further = 0 if has_factorials else point / 97
            values = {name: points[(shift + 2 * place) % 5] + place // 5 + further for place, name in enumerate(names)}
            verdict = _compare_at(left, right, _Evaluation(values, is_real), tolerance)
            if verdict is Equality.DIFFERENT:
                return verdict
            agreed += verdict is Equality.EQUAL
        if agreed and names and has_pieces(parts) and _differ_further(left, right, names, tolerance, is_real):
            return Equality.DIFFERENT
    return Equality.EQUAL if agreed and wanted == extra else Equality.DIFFERENT


def _differ_further(left: Node, right: Node, names: Sequence[str], tolerance: Any, is_real: bool) -> bool:
    """Return whether expressions of pieces differ at points where other pieces count."""

    def value(node: Node, point: Mapping[str, Fraction]) -> Any:
        try:
            return _Evaluation(point, is_real).value(node)
        except (TooComplexError, NotMathError, ZeroDivisionError, ValueError, OverflowError):
            return None  # numbers that are too large are no reason to refuse here

    for point in further_points((left, right), names, value):
        a, b = value(left, point), value(right, point)
        if a is not None and b is not None and mpmath.isfinite(a) and mpmath.isfinite(b):
            size = max(abs(a), abs(b))
            if abs(a - b) > tolerance * size and size > tolerance:
                return True
    return False


def _compare_at(left: Node, right: Node, evaluation: _Evaluation, tolerance: Any) -> Equality:
    try:
        a, b = evaluation.value(left), evaluation.value(right)
    except (TooComplexError, NotMathError):
        raise
    except (ZeroDivisionError, ValueError, OverflowError):
        return Equality.UNDECIDED
    if not mpmath.isfinite(a) or not mpmath.isfinite(b):
        return Equality.UNDECIDED
    size = max(abs(a), abs(b))
    return Equality.EQUAL if abs(a - b) <= tolerance * size or size < tolerance else Equality.DIFFERENT


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """Values of expressions at one point."""

    variables: Mapping[str, Fraction]
    is_real: bool
    """Whether a part that is not real makes the whole undefined, as in school: sqrt(x) sqrt(y) at negative x and y."""

    def value(self, node: Node) -> Any:
        _spend()
        match node:
            case Number(value=value):
                return mpmath.mpf(value.numerator) / value.denominator
            case Symbol(name=name):
                return mpmath.mpf(self.variables[name].numerator) / self.variables[name].denominator
            case Constant(name="infinity"):
                return mpmath.inf
            case Constant(name=name):
                return {"pi": +mpmath.pi, "e": +mpmath.e, "i": mpmath.mpc(0, 1)}[name]
            case Quantity(value=inner):
                return self.value(inner)
            case Apply(function=function, arguments=arguments):
                result = _apply(function, [self.value(argument) for argument in arguments])
                if self.is_real and isinstance(result, mpmath.mpc) and result.imag != 0:
                    raise ValueError("not real")
                return result
            case _:
                raise NotMathError("a list or matrix inside an expression")


def _apply(function: str, arguments: list[Any]) -> Any:
    match function:
        case "add":
            return mpmath.fsum(arguments)
        case "multiply":
            return mpmath.fprod(arguments)
        case "negate":
            return -arguments[0]
        case "divide":
            return arguments[0] / arguments[1]
        case "invert":
            return 1 / arguments[0]
        case "power":
            return _power(*arguments)
        case "root":
            return _power(arguments[0], 1 / arguments[1])
        case "percent":
            return arguments[0]
        case "max" | "min" if not any(isinstance(each, mpmath.mpc) for each in arguments):
            return max(arguments) if function == "max" else min(arguments)
        case _:
            return _function(function, arguments)


def _power(base: Any, exponent: Any) -> Any:
    if base != 0 and abs(exponent) * (abs(mpmath.log(abs(base))) + 1) > _MAX_LOG_MAGNITUDE:
        raise TooComplexError("a power too large")
    if base < 0 if not isinstance(base, mpmath.mpc) else False:
        return _negative_power(base, exponent)
    return base**exponent


def _negative_power(base: Any, exponent: Any) -> Any:
    """Take the real root of odd degree, as school mathematics does: (-8)^(1/3) is -2."""
    for degree in (3, 5, 7):
        numerator = exponent * degree
        if mpmath.almosteq(numerator, mpmath.nint(numerator)) and not mpmath.isint(exponent):
            sign = -1 if int(mpmath.nint(numerator)) % 2 else 1
            return sign * (-base) ** exponent
    return base**exponent


_FUNCTIONS = {
    "sqrt": mpmath.sqrt, "abs": abs, "sin": mpmath.sin, "cos": mpmath.cos, "tan": mpmath.tan, "cot": mpmath.cot,
    "sec": mpmath.sec, "csc": mpmath.csc, "arcsin": mpmath.asin, "arccos": mpmath.acos, "arctan": mpmath.atan,
    "sinh": mpmath.sinh, "cosh": mpmath.cosh, "tanh": mpmath.tanh, "ln": mpmath.log, "log": mpmath.log,
    "exp": mpmath.exp, "factorial": mpmath.factorial, "binom": mpmath.binomial, "floor": mpmath.floor,
    "ceil": mpmath.ceil,
}  # fmt: skip


def _function(function: str, arguments: list[Any]) -> Any:
    if function not in _FUNCTIONS:
        raise NotMathError(f"{function} has no value")
    limit = 10_000 if function in ("factorial", "binom", "exp", "sinh", "cosh") else mpmath.mpf(10) ** 1_000
    if any(abs(argument) > limit for argument in arguments):
        raise TooComplexError(f"{function} of a number too large")
    if function in _OF_INTEGERS and mpmath.mp.dps > _MAX_DIGITS_OF_GAMMA and not all(map(mpmath.isint, arguments)):
        raise TooComplexError(f"{function} of no integer to many digits")
    try:
        return _FUNCTIONS[function](*arguments)
    except TypeError as error:
        raise NotMathError(f"{function} of {len(arguments)} values") from error


class OutOfBudgetError(Exception):
    """A comparison has taken too much processor time."""


_deadline = threading.local()


def _spend() -> None:
    if time.thread_time() > getattr(_deadline, "cpu_seconds", float("inf")):
        raise OutOfBudgetError


def equals_any(answer: str, labels: Sequence[str]) -> bool | str:
    """Whether an answer equals one of the labels, with every stage of ``compare``; to be called in a worker.

    What is so large that it spends the budget of time, memory or depth is not equal: then it is the reason.
    """
    _deadline.cpu_seconds = time.thread_time() + MAX_CPU_SECONDS
    try:
        return any(compare(answer, label, undecided=compare_numerically) is Equality.EQUAL for label in labels)
    except OutOfBudgetError:
        return f"not equal as far as {MAX_CPU_SECONDS:g} s of processor time can tell"
    except (MemoryError, RecursionError) as error:
        return f"not equal as far as can be told: {type(error).__name__} while comparing"
    finally:
        del _deadline.cpu_seconds

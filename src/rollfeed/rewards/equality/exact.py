"""Exact values of arithmetic on rationals. Nothing goes through a float."""

from __future__ import annotations

import math
from fractions import Fraction

from rollfeed.rewards.equality.tree import Apply, Node, Number, Quantity

_MAX_ROOT_BITS = 2_000


def exact_value(node: Node) -> Fraction | None:
    """Return the value of a checked expression, or None when it is not arithmetic on rationals or is undefined.

    A percentage counts as the number before its sign; a unit does not matter.
    """
    match node:
        case Number(value=value):
            return value
        case Quantity(value=inner):
            return exact_value(inner)
        case Apply(function=function, arguments=arguments):
            values = [exact_value(argument) for argument in arguments]
            known = [value for value in values if value is not None]
            return _apply(function, known) if len(known) == len(values) else None
        case _:
            return None


def _apply(function: str, values: list[Fraction]) -> Fraction | None:
    match function, values:
        case "add", _:
            return sum(values, Fraction(0))
        case "multiply", _:
            return math.prod(values, start=Fraction(1))
        case "negate", [value]:
            return -value
        case "percent", [value]:
            return value
        case "divide", [above, below]:
            return above / below if below else None
        case "invert", [value]:
            return 1 / value if value else None
        case "power", [base, exponent]:
            return _power(base, exponent)
        case "abs", [value]:
            return abs(value)
        case "floor", [value]:
            return Fraction(math.floor(value))
        case "ceil", [value]:
            return Fraction(math.ceil(value))
        case "sqrt", [value]:
            return _root(value, 2)
        case "root", [value, degree]:
            return _root(value, int(degree)) if degree.denominator == 1 and 2 <= degree <= 64 else None
        case _:
            return _of_integers(function, values)


def _of_integers(function: str, values: list[Fraction]) -> Fraction | None:
    if any(value.denominator != 1 for value in values):
        return None
    integers = [int(value) for value in values]
    match function, integers:
        case "factorial", [value] if value >= 0:
            return Fraction(math.factorial(value))
        case "binom", [total, chosen] if total >= 0 and chosen >= 0:
            return Fraction(math.comb(total, chosen))
        case "gcd", [_, *_]:
            return Fraction(math.gcd(*integers))
        case "lcm", [_, *_]:
            return Fraction(math.lcm(*integers))
        case "max", [_, *_]:
            return Fraction(max(integers))
        case "min", [_, *_]:
            return Fraction(min(integers))
        case _:
            return None


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        root = _root(base, exponent.denominator) if exponent.denominator <= 64 else None
        return _power(root, Fraction(exponent.numerator)) if root is not None and base >= 0 else None
    if base == 0 and exponent <= 0:
        return None
    return base ** int(exponent)


def _root(value: Fraction, degree: int) -> Fraction | None:
    """Return the root when it is rational."""
    if value < 0:
        return None
    above, below = _integer_root(value.numerator, degree), _integer_root(value.denominator, degree)
    return Fraction(above, below) if above is not None and below is not None else None


def _integer_root(value: int, degree: int) -> int | None:
    if degree == 2:
        root = math.isqrt(value)
        return root if root * root == value else None
    if value.bit_length() > _MAX_ROOT_BITS:
        return None
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        if middle**degree < value:
            low = middle + 1
        else:
            high = middle
    return low if low**degree == value else None

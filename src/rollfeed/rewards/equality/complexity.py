"""Whether an expression may be evaluated: a bound on the size of every number in it, found before any is made.

The height of a rational is the decimal logarithm of the larger of numerator and denominator, at least 0. Heights of
sums, products, powers and factorials follow from those of their parts, so ``9^(9^9)`` is refused from its
heights alone. Irrational parts count by their magnitude.
"""

from __future__ import annotations

import math

from rollfeed.rewards.equality.exact import exact_value
from rollfeed.rewards.equality.tree import Apply, Based, Constant, Node, Number, TooComplexError, children, walk

MAX_HEIGHT = 20_000.0
"""Digits of the largest number that is ever made."""
MAX_NODES = 600
_MAX_FACTORIAL_HEIGHT = math.log10(5_000)
_SYMBOL_HEIGHT = 0.5
_MAX_EXACT_HEIGHT = 100.0
_MAX_VARIABLE_POWERS = 3


def check_complexity(node: Node) -> float:
    """Return the height of an expression.

    Raises:
        TooComplexError: If a number in it would be over ``MAX_HEIGHT``, or it has too many parts.
    """
    if sum(1 for _ in walk(node)) > MAX_NODES:
        raise TooComplexError(f"more than {MAX_NODES} parts")
    return _height(node, 0)


def _height(node: Node, towers: int) -> float:
    match node:
        case Number(value=value):
            height = max(_digits(value.numerator), _digits(value.denominator))
        case Based(digits=digits):
            height = 1.6 * len(digits)
        case Apply(function="power", arguments=(base, exponent)):
            height = _power_height(base, exponent, towers)
        case Apply(function=function, arguments=arguments):
            height = _function_height(function, [_height(argument, towers) for argument in arguments])
        case Constant():
            height = _SYMBOL_HEIGHT
        case _:
            height = max([_SYMBOL_HEIGHT, *(_height(part, towers) for part in children(node))])
    if height > MAX_HEIGHT:
        raise TooComplexError(f"numbers of more than {MAX_HEIGHT:.0f} digits")
    return height


def _digits(value: int) -> float:
    return value.bit_length() * math.log10(2)


def _power_height(base: Node, exponent: Node, towers: int) -> float:
    if towers >= _MAX_VARIABLE_POWERS:
        raise TooComplexError("a tower of powers")
    base_height = _height(base, towers)
    exponent_height = _exponent_height(exponent, towers + 1)
    if exponent_height > math.log10(MAX_HEIGHT) + 1:
        raise TooComplexError("an exponent of too many digits")
    return base_height * 10**exponent_height


def _exponent_height(exponent: Node, towers: int) -> float:
    """Return the height of an exponent, or the logarithm of its magnitude where that is known."""
    height = _height(exponent, towers)
    value = exact_value(exponent) if height <= _MAX_EXACT_HEIGHT else None
    return height if value is None else max(0.0, _digits(math.ceil(abs(value))))


def _function_height(function: str, heights: list[float]) -> float:
    if function == "factorial":
        if heights[0] > _MAX_FACTORIAL_HEIGHT:
            raise TooComplexError("a factorial of a large number")
        return heights[0] * 10 ** heights[0]
    if function == "binom":
        if max(heights) > _MAX_FACTORIAL_HEIGHT:
            raise TooComplexError("a binomial of large numbers")
        return float(10 ** heights[0])
    if function in ("exp", "sinh", "cosh"):
        if heights[0] > math.log10(MAX_HEIGHT) + 1:
            raise TooComplexError(f"{function} of a large number")
        return float(10 ** heights[0])
    return sum(heights) + math.log10(len(heights) + 1)

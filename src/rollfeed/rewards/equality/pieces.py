"""Points at which expressions made of pieces show all of their pieces.

``max(x, -1000)`` is ``x`` at every point of ordinary size, and ``|x + 100| - 100`` as well. So such expressions are
looked at where variables are tiny and huge, of both signs; at and beside the numbers that stand in them; and at and
beside the places where a piece begins, which are found between two points at which the sign of what decides differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

from rollfeed.rewards.equality.exact import exact_value
from rollfeed.rewards.equality.tree import Apply, Node, Symbol, walk

Value = Callable[[Node, Mapping[str, Fraction]], Any]
"""Of an expression at a point; None where it has none."""

_OF_PIECES = frozenset(("abs", "max", "min", "floor", "ceil"))
_STEPS = ("floor", "ceil")
_OF_INTEGERS = ("factorial", "binom")
_SIZES = (
    *(Fraction(1, 10**power) for power in (12, 6, 3)),
    *(Fraction(number) for number in (1, 12, 150, 1_100, 23_000, 10**6, 10**9, 10**12)),
)
_INTEGERS = tuple(map(Fraction, (*range(13), 20, 100, 10**4, 10**6)))
_SHIFT = Fraction(7, 6133)
"""Keeps points of ordinary size from being round."""
_NEAR = Fraction(1, 10**7)
_MAX_CONSTANTS = 12
_MAX_DECIDING = 6
_MAX_DIGITS = 200
_BISECTIONS = 120


def has_pieces(parts: Sequence[Node]) -> bool:
    """Whether one of the parts takes one of several forms, by the sign or the size of something that varies."""
    return any(_is_of_pieces(part) for part in parts if not _is_fixed(part))


def further_points(nodes: Sequence[Node], names: Sequence[str], value: Value) -> Iterator[Mapping[str, Fraction]]:
    """Yield points, a number for each variable, at which expressions may differ that are the same at ordinary ones."""
    parts = [part for node in nodes for part in walk(node)]
    functions = {part.function for part in parts if isinstance(part, Apply)}
    is_whole = not functions.isdisjoint(_OF_INTEGERS)
    sizes = _INTEGERS if is_whole else tuple(sign * size * (1 + _SHIFT) for size in _SIZES for sign in (1, -1))
    for at in range(len(sizes)):
        yield {name: sizes[(at * (2 * place + 1) + place) % len(sizes)] for place, name in enumerate(names)}
    around = _whole_around if is_whole else partial(_around, is_exact=functions.isdisjoint(_STEPS))
    ordinary = {name: Fraction(3571 + 811 * place, 9533) for place, name in enumerate(names)}
    if is_whole:
        ordinary = {name: Fraction(40 + 3 * place) for place, name in enumerate(names)}
    for constant in _constants(parts):
        yield from ({**ordinary, name: near} for name in names for near in around(constant))
    for deciding in [] if is_whole else _deciding(parts):
        for name in names:
            for place in _changes(deciding, name, ordinary, sizes, value):
                yield from ({**ordinary, name: near} for near in around(place))


def _whole_around(place: Fraction) -> Sequence[Fraction]:
    whole = Fraction(place.numerator // place.denominator)
    return [each for each in (whole - 1, whole, whole + 1) if each >= 0]


def _around(place: Fraction, *, is_exact: bool) -> Sequence[Fraction]:
    """Return a place and those beside it; not itself where that is an edge of a step, which rounding would choose."""
    size = max(abs(place), Fraction(1, 10**6))
    beside = [place - size * _NEAR, place + size * _NEAR, place - size / 3, place + size / 3]
    return [place, *beside] if is_exact else beside


def _constants(parts: Sequence[Node]) -> list[Fraction]:
    """Return the numbers in expressions and their sums, and those numbers negated, the first of them only."""
    found: dict[Fraction, None] = {}
    for part in parts:
        fixed = [part] if _is_fixed(part) else []
        if isinstance(part, Apply) and part.function == "add" and not fixed:
            terms = [value for each in part.arguments if (value := _small(each)) is not None]
            found |= {sum(terms, Fraction(0)): None} if len(terms) > 1 else {}
        for each in fixed:
            if (value := _small(each)) is not None and value not in (0, 1, -1):
                found[value] = None
    return [each for value in list(found)[:_MAX_CONSTANTS] for each in (value, -value)]


def _small(node: Node) -> Fraction | None:
    """Return the value of an expression without variables, unless it has many digits."""
    value = exact_value(node) if _is_fixed(node) else None
    if value is None or max(abs(value.numerator), value.denominator) > 10**_MAX_DIGITS:
        return None
    return value


def _deciding(parts: Sequence[Node]) -> list[Node]:
    """Return the expressions whose sign decides which form a part takes."""
    found: dict[Node, None] = {}
    for part in parts:
        match part:
            case Apply(function="abs", arguments=(inner,)):
                found[inner] = None
            case Apply(function="max" | "min", arguments=(first, *others)):
                for other in others:
                    found[Apply("add", (first, Apply("negate", (other,))))] = None
            case Apply(function="power", arguments=(base, _)) if not _is_fixed(base):
                found[base] = None
            case _:
                pass
    return [node for node in found if not _is_fixed(node)][:_MAX_DECIDING]


def _changes(
    deciding: Node, name: str, ordinary: Mapping[str, Fraction], sizes: Sequence[Fraction], value: Value
) -> Iterator[Fraction]:
    """Yield places between the sizes at which the sign of an expression changes."""

    def sign(at: Fraction) -> int | None:
        found = value(deciding, {**ordinary, name: at})
        if found is None or getattr(found, "imag", 0) != 0:
            return None
        return 0 if found == 0 else 1 if found.real > 0 else -1

    signs = [(at, found) for at in sorted(sizes) if (found := sign(at)) is not None]
    for (low, below), (high, above) in pairwise(signs):
        if below == above:
            continue
        for _ in range(_BISECTIONS):
            middle = ((low + high) / 2).limit_denominator(10**50)  # near it, and of few enough digits
            found = sign(middle)
            if found == below:
                low = middle
            else:
                high = middle
                if found == 0:
                    break
        yield high


def _is_of_pieces(node: Node) -> bool:
    match node:
        case Apply(function=function) if function in _OF_PIECES:
            return True
        case Apply(function="sqrt" | "root", arguments=(inner, *_)):
            return not _is_linear(inner)
        case Apply(function="power", arguments=(base, exponent)):
            value = exact_value(exponent)
            return value is not None and value.denominator != 1 and not _is_linear(base)
        case _:
            return False


def _is_linear(node: Node) -> bool:
    """Whether an expression is a sum of numbers and of variables times numbers, whose root has one form only."""
    match node:
        case Apply(function="add" | "negate", arguments=arguments):
            return all(map(_is_linear, arguments))
        case Apply(function="multiply" | "divide", arguments=arguments):
            return sum(not _is_fixed(each) for each in arguments) <= 1 and all(map(_is_linear, arguments))
        case Apply():
            return _is_fixed(node)
        case _:
            return True


def _is_fixed(node: Node) -> bool:
    return not any(isinstance(part, Symbol) for part in walk(node))

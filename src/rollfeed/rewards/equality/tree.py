"""Mathematical answers as trees.

A tree holds no more than was written: nothing in it is evaluated, so building one is cheap whatever it says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TypeAlias


class Equality(StrEnum):
    """Whether two answers mean the same."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNDECIDED = "undecided"
    """Not decided by exact means; numbers have to be tried."""


class NotMathError(ValueError):
    """The text does not read as mathematics; it can only be compared as text."""


class TooComplexError(ValueError):
    """The text is over a limit of size; it is not evaluated."""


@dataclass(frozen=True, slots=True)
class Number:
    """A literal number, exactly."""

    value: Fraction


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, with its subscript and primes in the name."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """``pi``, ``e``, ``i`` or ``infinity``."""

    name: str


@dataclass(frozen=True, slots=True)
class Apply:
    """A function or an operation of arithmetic, such as ``add``, ``power`` or ``sin``."""

    function: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Values:
    """Several values: a bare list, a tuple or interval, or a set."""

    opening: str
    """``(``, ``[``, ``{``, or empty for a bare list."""
    closing: str
    members: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of cells; not necessarily of equal length."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """``sides[0] operators[0] sides[1] ...``, as written."""

    operators: tuple[str, ...]
    sides: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value with a unit."""

    value: Node
    unit: str
    """Canonical where the unit is known; else empty."""


@dataclass(frozen=True, slots=True)
class Based:
    """Digits in a base other than ten."""

    digits: str
    base: int


Node: TypeAlias = Number | Symbol | Constant | Apply | Values | Matrix | Relation | Quantity | Based


def children(node: Node) -> tuple[Node, ...]:
    """Return the parts of a node, in the order written."""
    match node:
        case Apply(arguments=parts) | Values(members=parts) | Relation(sides=parts):
            return parts
        case Matrix(rows=rows):
            return tuple(cell for row in rows for cell in row)
        case Quantity(value=value):
            return (value,)
        case _:
            return ()


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all below it."""
    pending = [node]
    while pending:
        current = pending.pop()
        yield current
        pending.extend(children(current))

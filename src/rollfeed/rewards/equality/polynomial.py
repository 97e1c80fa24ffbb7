"""Polynomials with rational coefficients, and quotients of them, under a budget of work.

A monomial is a sorted tuple of (generator, exponent). Generators are variables, ``pi``, ``e``, ``i``, square roots of
primes, and whole expressions that are not taken apart. ``i`` and square roots stand with exponent 1 only,
since their squares are rational; so monomials in them are linearly independent over the rationals.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

MAX_TERMS = 200
MAX_EXPONENT = 60
MAX_WORK = 3_000
"""Products of two terms that one comparison may form."""

Monomial: TypeAlias = tuple[tuple[str, int], ...]
Polynomial: TypeAlias = dict[Monomial, Fraction]

IMAGINARY = "i"
ROOT_PREFIX = "root "
OPAQUE_PREFIX = "? "
TRANSCENDENTAL = frozenset(["pi", "e"])
VARIABLE_PREFIX = "x "


class OverBudgetError(ValueError):
    """Multiplying out would take too long."""


@dataclass(slots=True)
class Budget:
    """Work that is left."""

    left: int = MAX_WORK

    def spend(self, work: int) -> None:
        """Take ``work`` off.

        Raises:
            OverBudgetError: If that is more than is left.
        """
        self.left -= work
        if self.left < 0:
            raise OverBudgetError("over the budget of work")


@dataclass(frozen=True, slots=True)
class Quotient:
    """One polynomial over another, not reduced."""

    above: Polynomial
    below: Polynomial


def constant(value: Fraction) -> Polynomial:
    """Return ``value`` as a polynomial; zero has no terms."""
    return {(): value} if value else {}


def generator(name: str) -> Polynomial:
    """Return the polynomial that is one generator."""
    return {((name, 1),): Fraction(1)}


def add(left: Polynomial, right: Polynomial) -> Polynomial:
    """Return the sum."""
    total = dict(left)
    for monomial, coefficient in right.items():
        value = total.get(monomial, Fraction(0)) + coefficient
        if value:
            total[monomial] = value
        else:
            total.pop(monomial, None)
    if len(total) > MAX_TERMS:
        raise OverBudgetError(f"more than {MAX_TERMS} terms")
    return total


def scale(polynomial: Polynomial, factor: Fraction) -> Polynomial:
    """Return the polynomial with every coefficient times ``factor``."""
    return {monomial: coefficient * factor for monomial, coefficient in polynomial.items()} if factor else {}


def multiply(left: Polynomial, right: Polynomial, budget: Budget) -> Polynomial:
    """Return the product, with squares of ``i`` and of square roots replaced by their values.

    Raises:
        OverBudgetError: If that takes too long.
    """
    budget.spend(len(left) * len(right))
    total: Polynomial = {}
    for left_monomial, left_coefficient in left.items():
        for right_monomial, right_coefficient in right.items():
            monomial, factor = _join(left_monomial, right_monomial)
            total[monomial] = total.get(monomial, Fraction(0)) + left_coefficient * right_coefficient * factor
    total = {monomial: coefficient for monomial, coefficient in total.items() if coefficient}
    if len(total) > MAX_TERMS:
        raise OverBudgetError(f"more than {MAX_TERMS} terms")
    return total


def power(base: Polynomial, exponent: int, budget: Budget) -> Polynomial:
    """Return ``base`` to a power of at least 0.

    Raises:
        OverBudgetError: If that takes too long.
    """
    if exponent > MAX_EXPONENT and len(base) > 1:
        raise OverBudgetError(f"an exponent over {MAX_EXPONENT}")
    if exponent > 10_000:
        raise OverBudgetError("an exponent over 10000")
    result = constant(Fraction(1))
    for bit in bin(exponent)[2:]:
        result = multiply(result, result, budget)
        if bit == "1":
            result = multiply(result, base, budget)
    return result


def divide(left: Quotient, right: Quotient, budget: Budget) -> Quotient:
    """Return the quotient of two quotients; the caller sees to zero."""
    return Quotient(multiply(left.above, right.below, budget), multiply(left.below, right.above, budget))


def is_decided(polynomial: Polynomial) -> bool:
    """Whether a polynomial that is not written as zero is not zero: its generators must be independent.

    Of the transcendental numbers one at most may occur, since nobody knows whether pi and e are independent.
    """
    names = {name for monomial in polynomial for name, _ in monomial}
    return len(names & TRANSCENDENTAL) <= 1 and not any(name.startswith(OPAQUE_PREFIX) for name in names)


def _join(left: Monomial, right: Monomial) -> tuple[Monomial, Fraction]:
    exponents = dict(left)
    factor = Fraction(1)
    for name, exponent in right:
        exponents[name] = exponents.get(name, 0) + exponent
        if exponents[name] == 2 and name == IMAGINARY:
            factor, exponents[name] = -factor, 0
        elif exponents[name] == 2 and name.startswith(ROOT_PREFIX):
            factor, exponents[name] = factor * int(name.removeprefix(ROOT_PREFIX)), 0
    return tuple(sorted((name, exponent) for name, exponent in exponents.items() if exponent)), factor

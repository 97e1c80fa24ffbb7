"""Expressions multiplied out, so that equal ones become the same quotient of polynomials, under a budget of work.

Coefficients are rational. A monomial is a sorted tuple of (generator, exponent). Generators are variables, ``pi``,
``e``, ``i``, square roots of primes, and whole expressions that are not taken apart. ``i`` and square roots stand with
exponent 1 only, since their squares are rational; so monomials in them are linearly independent over the rationals.
What spends the budget raises OverBudgetError.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from rollfeed.rewards.equality.exact import exact_value
from rollfeed.rewards.equality.tree import Apply, Constant, Equality, Node, Number, Quantity, Symbol, walk

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
_ONE: Polynomial = {(): Fraction(1)}
_MAX_RADICAND = 10**8


class OverBudgetError(ValueError):
    """Multiplying out would take too long."""


@dataclass(slots=True)
class Budget:
    """Work that is left."""

    left: int = MAX_WORK

    def spend(self, work: int) -> None:
        """Take ``work`` off. Raises OverBudgetError if that is more than is left."""
        self.left -= work
        if self.left < 0:
            raise OverBudgetError("over the budget of work")


@dataclass(frozen=True, slots=True)
class Quotient:
    """One polynomial over another, not reduced."""

    above: Polynomial
    below: Polynomial


class UndefinedError(ValueError):
    """The expression divides by zero."""


class NormalForms:
    """Compares expressions multiplied out. All comparisons share one budget of work, and no form is made twice."""

    def __init__(self) -> None:
        self._budget = Budget()
        self._forms: dict[Node, Quotient] = {}

    def compare(self, left: Node, right: Node) -> Equality:
        """Compare two expressions exactly; UNDECIDED when one is not polynomial, or the budget is spent.

        Raises:
            UndefinedError: If one divides by zero.
        """
        try:
            first, second = self._crosswise(left, right)
            difference = add(first, scale(second, Fraction(-1)))
        except OverBudgetError:
            return Equality.UNDECIDED
        if not difference:
            return Equality.EQUAL
        return Equality.DIFFERENT if is_decided(difference) else Equality.UNDECIDED

    def compare_up_to_a_factor(self, left: Node, right: Node) -> Equality:
        """Compare ``left = 0`` with ``right = 0``: EQUAL when one is a number other than zero times the other.

        Raises:
            UndefinedError: If one divides by zero.
        """
        try:
            first, second = self._crosswise(left, right)
        except OverBudgetError:
            return Equality.UNDECIDED
        if not first or not second:
            return Equality.EQUAL if not first and not second else Equality.DIFFERENT
        monomial = min(first)
        if monomial in second and not add(first, scale(second, -first[monomial] / second[monomial])):
            return Equality.EQUAL
        return Equality.DIFFERENT if is_decided({**first, **second}) else Equality.UNDECIDED

    def _crosswise(self, left: Node, right: Node) -> tuple[Polynomial, Polynomial]:
        """Return both expressions times both denominators."""
        a, b = self._form(left), self._form(right)
        return multiply(a.above, b.below, self._budget), multiply(b.above, a.below, self._budget)

    def _form(self, node: Node) -> Quotient:
        form = self._forms.get(node)
        if form is None:
            form = self._forms[node] = multiplied_out(node, self._budget)
        return form


def multiplied_out(node: Node, budget: Budget) -> Quotient:
    """Return an expression as a quotient of polynomials.

    Raises:
        OverBudgetError: If that takes too long.
        UndefinedError: If it divides by zero.
    """
    budget.spend(1)
    match node:
        case Number(value=value):
            return Quotient(constant(value), _ONE)
        case Symbol(name=name):
            return Quotient(generator(VARIABLE_PREFIX + name), _ONE)
        case Constant(name="infinity"):
            return Quotient(generator(OPAQUE_PREFIX + "infinity"), _ONE)
        case Constant(name=name):
            return Quotient(generator(name), _ONE)
        case Quantity(value=inner):
            return multiplied_out(inner, budget)
        case Apply(function=function, arguments=arguments):
            return _apply(node, function, arguments, budget)
        case _:
            return _opaque(node)


def _apply(node: Apply, function: str, arguments: tuple[Node, ...], budget: Budget) -> Quotient:
    match function:
        case "add" | "multiply":
            total = multiplied_out(arguments[0], budget)
            for argument in arguments[1:]:
                term = multiplied_out(argument, budget)
                total = _sum(total, term, budget) if function == "add" else _product(total, term, budget)
            return total
        case "negate":
            inner = multiplied_out(arguments[0], budget)
            return Quotient(scale(inner.above, Fraction(-1)), inner.below)
        case "percent":
            return multiplied_out(arguments[0], budget)
        case "divide" | "invert":
            above = multiplied_out(arguments[0], budget) if function == "divide" else Quotient(_ONE, _ONE)
            below = multiplied_out(arguments[-1], budget)
            if not below.above:
                raise UndefinedError("division by zero")
            return divide(above, below, budget)
        case "power":
            return _power(node, arguments[0], arguments[1], budget)
        case "sqrt":
            return _square_root(node, arguments[0])
        case _:
            value = exact_value(node)
            return _opaque(node) if value is None else Quotient(constant(value), _ONE)


def _sum(left: Quotient, right: Quotient, budget: Budget) -> Quotient:
    if left.below == right.below:
        return Quotient(add(left.above, right.above), left.below)
    above = add(multiply(left.above, right.below, budget), multiply(right.above, left.below, budget))
    return Quotient(above, multiply(left.below, right.below, budget))


def _product(left: Quotient, right: Quotient, budget: Budget) -> Quotient:
    return Quotient(multiply(left.above, right.above, budget), multiply(left.below, right.below, budget))


def _power(node: Apply, base: Node, exponent: Node, budget: Budget) -> Quotient:
    value = exact_value(exponent)
    if value is not None and value.denominator == 2:
        root = _square_root(Apply("sqrt", (base,)), base)
        return _whole_power(root, value.numerator, budget)
    if value is None or value.denominator != 1:
        return _opaque(node)
    return _whole_power(multiplied_out(base, budget), int(value), budget)


def _whole_power(base: Quotient, exponent: int, budget: Budget) -> Quotient:
    if not base.above and exponent <= 0:
        raise UndefinedError("zero to a power that is not positive")
    raised = Quotient(power(base.above, abs(exponent), budget), power(base.below, abs(exponent), budget))
    return raised if exponent >= 0 else Quotient(raised.below, raised.above)


def _square_root(node: Apply, radicand: Node) -> Quotient:
    value = exact_value(radicand)
    if value is None or max(abs(value.numerator), value.denominator) > _MAX_RADICAND:
        return _opaque(node)
    outside, inside = Fraction(1, value.denominator), abs(value.numerator) * value.denominator
    if inside > _MAX_RADICAND:
        return _opaque(node)
    root: Polynomial = generator(IMAGINARY) if value < 0 else _ONE
    divisor, primes = 2, []
    while divisor * divisor <= inside:
        while inside % (divisor * divisor) == 0:
            inside, outside = inside // (divisor * divisor), outside * divisor
        if inside % divisor == 0:
            inside //= divisor
            primes.append(divisor)
        divisor += 1
    if inside != 1:
        primes += [inside] if inside else []
    names = [(f"{ROOT_PREFIX}{prime}", 1) for prime in primes]
    monomials = {tuple(sorted([*monomial, *names])): coefficient for monomial, coefficient in root.items()}
    return Quotient(scale(monomials, outside) if value else {}, _ONE)


def _opaque(node: Node) -> Quotient:
    return Quotient(generator(OPAQUE_PREFIX + repr(node)), _ONE)


def has_infinity(node: Node) -> bool:
    """Whether infinity occurs in an expression."""
    return any(isinstance(part, Constant) and part.name == "infinity" for part in walk(node))


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
    """Return the product, with squares of ``i`` and of square roots replaced by their values."""
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
    """Return ``base`` to a power of at least 0."""
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

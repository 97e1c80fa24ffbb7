"""Expressions multiplied out, so that equal ones become the same quotient of polynomials."""

from __future__ import annotations

from fractions import Fraction

from rollfeed.rewards.equality.exact import exact_value
from rollfeed.rewards.equality.polynomial import (
    IMAGINARY,
    OPAQUE_PREFIX,
    ROOT_PREFIX,
    VARIABLE_PREFIX,
    Budget,
    OverBudgetError,
    Polynomial,
    Quotient,
    add,
    constant,
    divide,
    generator,
    is_decided,
    multiply,
    power,
    scale,
)
from rollfeed.rewards.equality.tree import Apply, Constant, Equality, Node, Number, Quantity, Symbol, walk

_ONE = constant(Fraction(1))
_MAX_RADICAND = 10**8


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

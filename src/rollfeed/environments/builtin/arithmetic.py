"""Arithmetic as problems are made of it and models write it; nothing is evaluated but sums, products and fractions."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from random import Random

_MAX_CHARS = 300
_ALLOWED = re.compile(r"[0-9+\-*/() ]*")
_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_AS_WRITTEN = {"\\times": "*", "\\cdot": "*", "\\div": "/", "\u00d7": "*", "\u00f7": "/", "\u2212": "-"}


def plain(text: str) -> str:
    """Return a text with the signs of arithmetic as Python has them."""
    for written, sign in _AS_WRITTEN.items():
        text = text.replace(written, sign)
    return text


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """Return the value of an expression, and the numbers in it. Raises ValueError if it has none, as by 1 / 0."""
    if len(expression) > _MAX_CHARS or not _ALLOWED.fullmatch(expression):
        raise ValueError("it is too long, or has other signs than those of arithmetic")
    numbers: list[int] = []
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, numbers), numbers
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("it is no arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("it divides by zero") from None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int() as number):
            numbers.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, numbers)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left, numbers), _value(right, numbers))
    raise ValueError("only + - * / and brackets are known")


def combine(numbers: list[int], random: Random, *, signs: str = "+-*", largest: int = 1_000) -> str:
    """Return an expression of all numbers, at least two, whose values on the way are whole and not negative.

    A division that leaves a remainder, or a product above ``largest``, is a sum instead.
    """
    terms = [(number, str(number)) for number in numbers]
    while len(terms) > 1:
        random.shuffle(terms)
        (left, left_text), (right, right_text) = sorted((terms.pop(), terms.pop()), reverse=True)
        sign = random.choice(signs)
        if (sign == "/" and (right == 0 or left % right)) or (sign == "*" and left * right > largest):
            sign = "+"
        terms.append((int(evaluate(f"{left} {sign} {right}")[0]), f"({left_text} {sign} {right_text})"))
    return terms[0][1][1:-1]

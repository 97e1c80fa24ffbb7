"""The tool ``calculator``: arithmetic, and nothing that takes long or much memory."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from rollfeed.errors import ToolError

_Number: TypeAlias = int | float

_MAX_CHARS = 1_000
_MAX_BITS = 4_096
_MAX_FACTORIAL = 400
_MAX_DIGITS = 100
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: _power(base, exponent),
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "asin")},
    **{name: getattr(math, name) for name in ("acos", "atan", "floor", "ceil", "gcd", "radians", "degrees")},
    "abs": abs,
    "min": min,
    "max": max,
    "round": lambda number, digits=0: _rounded(number, digits),
    "factorial": lambda number: _factorial(number),
}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_AS_WRITTEN = str.maketrans({"^": "**", "×": "*", "·": "*", "÷": "/", "−": "-"})  # noqa: RUF001


class Calculator:
    """Fits :class:`rollfeed.protocols.Tool`."""

    name = "calculator"
    description = (
        "Works out an arithmetic expression: numbers, + - * / // % **, brackets, functions such as sqrt, and pi."
    )
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "For example (12 + 3) * 4"}},
        "required": ["expression"],
        "additionalProperties": False,
    }
    is_idempotent = True

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the value in digits. Raises ToolError if it is no arithmetic, or has no value that can be told."""
        return calculate(arguments["expression"])


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression: whole numbers exactly, others to 12 digits.

    Raises:
        ToolError: If it is no arithmetic, or has no value that can be told.
    """
    if len(expression) > _MAX_CHARS:
        raise ToolError(f"the expression has more than {_MAX_CHARS:,} characters")
    try:
        value = _value(ast.parse(expression.translate(_AS_WRITTEN).strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolError(f"{expression!r:.100} is no arithmetic expression") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ToolError(f"{expression!r:.100} has no value: {error}") from None
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        return format(value, ".12g")
    return str(value)


def _value(node: ast.expr) -> _Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, arguments)))
    raise ToolError(f"{ast.unparse(node)!r:.100} is no arithmetic that the calculator knows")


def _bounded(value: Any) -> _Number:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ToolError("the number is too large")
    if isinstance(value, complex) or not math.isfinite(value):
        raise ToolError("the result is no real number")
    return value  # type: ignore[no-any-return]


def _power(base: _Number, exponent: _Number) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) * max(base.bit_length(), 1) > _MAX_BITS:
        raise ToolError("the number is too large")
    return base**exponent


def _rounded(number: _Number, digits: _Number) -> _Number:
    if not isinstance(digits, int) or abs(digits) > _MAX_DIGITS:
        raise ToolError(f"a number is rounded to at most {_MAX_DIGITS} digits")
    return round(number, digits)


def _factorial(number: _Number) -> int:
    if number > _MAX_FACTORIAL:
        raise ToolError("the number is too large")
    return math.factorial(number)  # type: ignore[arg-type]

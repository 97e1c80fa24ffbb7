r"""Sums, products, powers and functions: the arithmetic of the grammar."""

from __future__ import annotations

from abc import abstractmethod
from fractions import Fraction

from rollfeed.rewards.equality.notation.lexer import FUNCTIONS, GREEK, Token
from rollfeed.rewards.equality.notation.literals import MAX_DEPTH, LiteralParser, literal
from rollfeed.rewards.equality.tree import (
    Apply,
    Constant,
    Node,
    NotMathError,
    Number,
    Quantity,
    TooComplexError,
    Values,
)

_MAX_POSTFIXES = 6
_CONSTANT_NAMES = {"pi": "pi", "infty": "infinity"}
_TAKE_ANGLES = frozenset(["sin", "cos", "tan", "cot", "sec", "csc"])
_CLOSERS = {"lfloor": "rfloor", "lceil": "rceil"}
_STARTS_FACTOR = frozenset(["number", "name", "letters", "(", "[", "{", "set{", "|", "begin"])
_NOT_FACTORS = frozenset([
    "cup", "cap", "setminus", "le", "ge", "ne", "in", "approx", "equiv", "to", "sim", "times", "cdot", "div",
    "pm", "mp", "rfloor", "rceil", "circ", "land", "lor", "%", "prime",
])  # fmt: skip


class ExpressionParser(LiteralParser):
    """Reads sums; the parser of lists, relations and brackets builds on it."""

    def sum(self) -> Node:
        tree = self._signed_product()
        terms = [tree]
        while (operator := self.take("+", "-", "pm", "mp")) is not None:
            term = self._signed_product()
            terms.append(_signed(operator.text if operator.kind == "name" else operator.kind, term))
        return tree if len(terms) == 1 else Apply("add", tuple(terms))

    def _signed_product(self) -> Node:
        signs = []
        while (operator := self.take("+", "-", "pm", "mp")) is not None:
            signs.append(operator.text if operator.kind == "name" else operator.kind)
            if len(signs) > MAX_DEPTH:
                raise TooComplexError("too many signs")
        tree = self._product()
        for sign in reversed(signs):
            tree = _signed(sign, tree)
        return tree

    def _product(self) -> Node:
        factors = [self.quantity(self._power())]
        while True:
            kind = self.peek_kind()
            if kind in ("*", "cdot", "times"):
                self.advance()
                factors.append(self._signed_power())
            elif kind in ("/", "div"):
                self.advance()
                factors.append(Apply("invert", (self._signed_power(),)))
            elif kind == ":":
                self.advance()
                with self.deeper():
                    return Apply("ratio", (_multiply(factors), self._product()))
            elif self._starts_factor():
                if self.peek_kind() == "number":
                    raise NotMathError("a number follows a value without a sign between them")
                factors.append(self._power())
            elif self.peek_kind() == "words":
                return self.quantity(_multiply(factors))
            else:
                return _multiply(factors)

    def _starts_factor(self) -> bool:
        token = self.peek()
        if token.kind == "|":
            return self.bars == 0
        if token.kind == "name":
            return token.text not in _NOT_FACTORS
        return token.kind in _STARTS_FACTOR

    def _signed_power(self) -> Node:
        negative = False
        while (sign := self.take("+", "-")) is not None:
            negative ^= sign.kind == "-"
        tree = self.quantity(self._power())
        return Apply("negate", (tree,)) if negative else tree

    def _power(self) -> Node:
        tree = self._atom()
        for _ in range(_MAX_POSTFIXES):
            kind = self.peek_kind()
            if kind == "^":
                self.advance()
                if self._takes_degree():
                    tree = self._degrees(tree)
                    continue
                with self.deeper():
                    tree = Apply("power", (tree, self._exponent()))
            elif kind == "!":
                self.advance()
                tree = Apply("factorial", (tree,))
            elif kind == "%":
                self.advance()
                tree = Apply("percent", (tree,))
            elif kind == "circ":
                self.advance()
                tree = self._degrees(tree)
            else:
                return tree
        raise TooComplexError(f"more than {_MAX_POSTFIXES} powers or factorials of one value")

    def _takes_degree(self) -> bool:
        length = 3 if self.peek_kind() == "{" else 1
        if self.peek_kind(length // 2) != "circ":
            return False
        for _ in range(length):
            self.advance()
        return True

    def _degrees(self, value: Node) -> Node:
        scale = self.take("letters") if self.peek().text in ("C", "F") else None
        return Quantity(value, "degree" if scale is None else f"degree {scale.text}")

    def _exponent(self) -> Node:
        if self.peek_kind() == "{":
            return self.braced()
        if self.peek_kind() in ("-", "+"):
            sign = self.advance().kind
            with self.deeper():
                return _signed(sign, self._exponent())
        base = self._atom()
        if self.take("^"):  # a tower without brackets: a^b^c is a^(b^c)
            with self.deeper():
                return Apply("power", (base, self._exponent()))
        return base

    # Atoms

    def _atom(self) -> Node:
        token = self.peek()
        match token.kind:
            case "number":
                return self.number()
            case "letters":
                return self.letter()
            case "name":
                return self._named()
            case "(" | "[" | "set{":
                tree = self.bracketed()
                return self.with_base(tree)
            case "{":
                return self.braced()
            case "|":
                return self._absolute()
            case "begin":
                return self.matrix()
            case _:
                raise NotMathError(f"did not expect {self.peek_kind()!r}")

    def literal_fraction(self) -> Fraction | None:
        r"""Take ``\frac`` with two literal integers; leave anything else."""
        start, tokens = self.position, list(self.tokens)
        self.advance()
        parts = []
        for _ in range(2):
            argument = self._argument(tight=True)
            if not isinstance(argument, Number) or argument.value.denominator != 1:
                self.position, self.tokens = start, tokens
                return None
            parts.append(argument.value)
        if parts[1] == 0 or not 0 < parts[0] < parts[1]:
            self.position, self.tokens = start, tokens
            return None
        return parts[0] / parts[1]

    def _named(self) -> Node:
        name = self.advance().text
        if name in _CONSTANT_NAMES:
            return Constant(_CONSTANT_NAMES[name])
        if name in ("frac", "binom"):
            if self.peek_kind() == "(" and name == "binom":
                return self._function(name)
            arguments = (self._argument(tight=True), self._argument(tight=True))
            return Apply("divide" if name == "frac" else "binom", arguments)
        if name == "sqrt":
            return self._root()
        if name == "emptyset":
            self.tokens[self.position : self.position] = [Token("set{", "{", False), Token("set}", "}", False)]
            return self._atom()
        if name in _CLOSERS:
            with self.deeper():
                inner = self.sum()
            self.expect(_CLOSERS[name])
            return Apply("floor" if name == "lfloor" else "ceil", (inner,))
        if name in FUNCTIONS:
            return self._function(name)
        if name in GREEK:
            return self.symbol_or_constant(name)
        raise NotMathError(f"\\{name:.20} is not read")

    def _root(self) -> Node:
        degree: Node | None = None
        if self.take("["):
            with self.deeper():
                degree = self.sum()
            self.expect("]")
        radicand = self._argument(tight=False)
        return Apply("sqrt", (radicand,)) if degree is None else Apply("root", (radicand, degree))

    def _argument(self, *, tight: bool) -> Node:
        r"""Take what a command applies to: braces, or one token, of a number its first digit if ``tight``."""
        token = self.peek()
        if token.kind == "{":
            return self.braced()
        if token.kind == "number" and tight and len(token.text) > 1:
            if not token.text.isdigit():
                self.fail("a decimal number without braces")
            self.tokens[self.position : self.position + 1] = [
                Token("number", token.text[0], token.spaced),
                Token("number", token.text[1:], False),
            ]
        if token.kind == "number":
            return Number(literal(self.advance().text))
        with self.deeper():
            return self._atom()

    def _function(self, name: str) -> Node:
        power: Node | None = None
        base: Node | None = None
        for _ in range(2):
            if self.take("^"):
                with self.deeper():
                    power = self._exponent()
            elif self.peek_kind() == "_" and name in ("log", "lg", "ln"):
                self.advance()
                base = self._argument(tight=self.peek(1).kind not in _STARTS_FACTOR)  # \log_23 is \log_2 3
        with self.deeper():
            arguments = self._function_arguments()
        if name in _TAKE_ANGLES:
            arguments = tuple(_in_radians(argument) for argument in arguments)
        tree: Node = Apply(name, arguments)
        if base is not None:
            tree = Apply("divide", (Apply("ln", arguments), Apply("ln", (base,))))
        elif name == "lg":
            tree = Apply("divide", (Apply("ln", arguments), Apply("ln", (Number(Fraction(10)),))))
        if power is None:
            return tree
        if power == Apply("negate", (Number(Fraction(1)),)) and name in ("sin", "cos", "tan"):
            return Apply("arc" + name, arguments)
        return Apply("power", (tree, power))

    def _function_arguments(self) -> tuple[Node, ...]:
        if self.peek_kind() in ("(", "[", "{", "|"):
            is_bar = self.peek_kind() == "|"
            inner = self._atom()
            return inner.members if not is_bar and isinstance(inner, Values) else (inner,)
        factors = [self._power()]
        while self.peek().kind in ("number", "letters") or self.peek_kind() in ("frac", "sqrt", "pi", *GREEK):
            factors.append(self._power())
        return (_multiply(factors),)

    def _absolute(self) -> Node:
        self.expect("|")
        with self.deeper():
            self.bars = 1
            inner = self.sum()
            self.expect("|")
        return Apply("abs", (inner,))

    @abstractmethod
    def bracketed(self) -> Node:
        """Take round or square brackets, or the braces of a set."""

    @abstractmethod
    def braced(self) -> Node:
        """Take the braces around an argument."""

    @abstractmethod
    def matrix(self) -> Node:
        """Take an environment of rows and cells."""


def _signed(sign: str, tree: Node) -> Node:
    match sign:
        case "-":
            return Apply("negate", (tree,))
        case "pm" | "mp":
            return Apply(sign, (tree,))
        case _:
            return tree


def _in_radians(angle: Node) -> Node:
    if isinstance(angle, Quantity) and angle.unit == "degree":
        return Apply("multiply", (angle.value, Apply("divide", (Constant("pi"), Number(Fraction(180))))))
    return angle


def _multiply(factors: list[Node]) -> Node:
    return factors[0] if len(factors) == 1 else Apply("multiply", tuple(factors))

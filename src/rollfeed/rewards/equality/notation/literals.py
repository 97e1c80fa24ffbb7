"""Numbers, names and units: what the grammar has at its leaves."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NoReturn

from rollfeed.rewards.equality.notation.lexer import REPEATING_MARK, Token
from rollfeed.rewards.equality.notation.units import SCALES, canonical_unit, is_unit
from rollfeed.rewards.equality.tree import (
    Apply,
    Based,
    Constant,
    Node,
    NotMathError,
    Number,
    Quantity,
    Symbol,
    TooComplexError,
    children,
)

MAX_DEPTH = 30
MAX_DIGITS = 1_000
MAX_EXPONENT_DIGITS = 4
_END = Token("end of text", "", False)
_ONE_LETTER_UNITS = frozenset("mgsLlhNJWVAK")


class LiteralParser(ABC):
    """Takes tokens one by one, and reads numbers, names and units of them."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = list(tokens)
        self.position = 0
        self._depth = 0
        self.bars = 0

    def at_end(self) -> bool:
        return self.position >= len(self.tokens)

    def peek(self, offset: int = 0) -> Token:
        place = self.position + offset
        return self.tokens[place] if place < len(self.tokens) else _END

    def peek_kind(self, offset: int = 0) -> str:
        token = self.peek(offset)
        return token.text if token.kind == "name" else token.kind

    def advance(self) -> Token:
        token = self.peek()
        if token is _END:
            raise NotMathError("it ends too early")
        self.position += 1
        return token

    def take(self, *kinds: str) -> Token | None:
        return self.advance() if self.peek_kind() in kinds else None

    def expect(self, kind: str) -> None:
        if self.take(kind) is None:
            raise NotMathError(f"expected {kind!r}, not {self.peek_kind()!r}")

    def fail(self, reason: str) -> NoReturn:
        raise NotMathError(reason)

    @contextlib.contextmanager
    def deeper(self) -> Iterator[None]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise TooComplexError(f"nested deeper than {MAX_DEPTH}")
        bars, self.bars = self.bars, 0
        yield
        self._depth -= 1
        self.bars = bars

    def quantity(self, value: Node) -> Node:
        """Take the unit that follows a number, if one does, and "million" before it."""
        value = self._scaled(value)
        token = self.peek()
        if token.kind == "words":
            return Quantity(value, self._unit_in_words()) if is_constant(value) else self.fail("words")
        if token.kind != "letters" or not is_constant(value) or not isinstance(value, Number | Apply):
            return value
        if len(token.text) == 1 and not (token.spaced and token.text in _ONE_LETTER_UNITS):
            return value
        return self._plain_unit(value)

    def _scaled(self, value: Node) -> Node:
        token = self.peek()
        word, _, rest = token.text.partition(" ")
        if token.kind not in ("words", "letters") or word.lower() not in SCALES or not is_constant(value):
            return value
        if rest:
            self.tokens[self.position] = Token("words", rest, True)
        else:
            self.advance()
        return Apply("multiply", (value, Number(Fraction(SCALES[word.lower()]))))

    def _unit_in_words(self) -> str:
        words: list[str] = []
        while self.peek_kind() in ("words", "letters", "/", "cdot"):
            words.append(self.advance().text)
            if self.take("^"):
                words += ["^", self._subscript()]
        return canonical_unit(" ".join(words))

    def _plain_unit(self, value: Node) -> Node:
        words: list[str] = []
        offset = 0
        while True:
            token = self.peek(offset)
            if token.kind == "letters" and (token.spaced or offset == 0 or words[-1:] == ["/"]):
                words.append(token.text)
            elif token.kind == "/" and self.peek(offset + 1).kind == "letters":
                words.append("/")
            elif token.kind == "^" and words and self.peek(offset + 1).kind == "number":
                words += ["^", self.peek(offset + 1).text]
                offset += 1
            else:
                break
            offset += 1
        known = any(is_unit(word) for word in words)
        if len(words[0]) == 1 and not all(is_unit(word) for word in words if word.isalpha()):
            return value
        if not known and (len(words) > 4 or not all(len(word) > 3 for word in words)):
            return value
        if not self._unit_ends(offset):
            return value
        for _ in range(offset):
            self.advance()
        return Quantity(value, canonical_unit(" ".join(words)))

    def _unit_ends(self, offset: int) -> bool:
        return self.peek(offset).kind in ("end of text", ",", ";", "or")

    def number(self) -> Node:
        token = self.advance()
        text = token.text
        if self.peek_kind() == "_" and text.isdigit():
            return self._based(text)
        value = literal(text)
        if not text.isdigit():
            return Number(value)
        following = self.peek()
        if following.kind == "number" and following.spaced and following.text.isdigit():
            return Number(self._spaced_number(text, value))
        if following.kind == "name" and following.text == "frac":
            part = self.literal_fraction()
            if part is not None and 0 < part < 1:
                return Number(value + part)
        return Number(value)

    @abstractmethod
    def literal_fraction(self) -> Fraction | None:
        """Take a fraction of two literal integers, if one follows."""

    def _spaced_number(self, text: str, value: Fraction) -> Fraction:
        following = self.peek()
        if self.peek_kind(1) == "/" and self.peek(2).kind == "number" and self.peek(2).text.isdigit():
            part = _fraction(following.text, self.peek(2).text)
            self.position += 3
            if part >= 1:
                raise NotMathError("a mixed number ends with a fraction below one")
            return value + part
        if len(text) > 3:
            raise NotMathError("two numbers follow each other")
        while (following := self.peek()).kind == "number" and following.spaced:
            if len(following.text) != 3 or not following.text.isdigit():
                raise NotMathError("two numbers follow each other")
            text += self.advance().text
        return literal(text)

    def letter(self) -> Node:
        token = self.advance()
        run = token.text
        if len(run) > 3:
            raise NotMathError(f"{run!r:.20} is a word")
        if len(run) > 1:
            if len(self.tokens) == 1 and set(run) - set("xyz"):
                raise NotMathError(f"{run!r} is a word")
            rest = [Token("letters", letter, False) for letter in run[1:]]
            self.tokens[self.position : self.position] = rest
        return self.symbol_or_constant(run[0])

    def symbol_or_constant(self, name: str) -> Node:
        name += "".join(self._primes())
        if self.peek_kind() == "_":
            self.advance()
            name += "_" + self._subscript()
            name += "".join(self._primes())
        return Constant(name) if name in ("e", "i") else Symbol(name)

    def _primes(self) -> Iterator[str]:
        while self.take("'"):
            yield "'"

    def _subscript(self) -> str:
        if self.take("{") is None:
            return self.advance().text
        texts = []
        while self.take("}") is None:
            texts.append(self.advance().text)
        return "".join(texts)

    def _based(self, digits: str) -> Node:
        self.expect("_")
        base = self._subscript()
        if not base.isdigit() or len(base) > 2 or not 2 <= int(base) <= 36:
            raise NotMathError("a number with a subscript that is no base")
        if len(digits) > MAX_DIGITS:
            raise TooComplexError(f"more than {MAX_DIGITS} digits")
        return Based(digits.lstrip("0") or "0", int(base))

    def with_base(self, tree: Node) -> Node:
        if self.peek_kind() != "_" or not isinstance(tree, Number) or tree.value.denominator != 1:
            return tree
        return self._based(str(tree.value.numerator))


def is_constant(node: Node) -> bool:
    """Whether no variable occurs in a tree."""
    if isinstance(node, Symbol):
        return False
    return all(is_constant(part) for part in children(node))


def _fraction(numerator: str, denominator: str) -> Fraction:
    below = literal(denominator)
    if below == 0:
        raise NotMathError("division by zero")
    return literal(numerator) / below


def literal(text: str) -> Fraction:
    """Return the value of the text of a number. Raises TooComplexError if it has too many digits."""
    if len(text) > MAX_DIGITS:
        raise TooComplexError(f"more than {MAX_DIGITS} digits")
    head, _, repeating = text.partition(REPEATING_MARK)
    if repeating:
        whole, _, decimals = head.partition(".")
        scale, all_nines = int(f"1{'0' * len(decimals)}"), int("9" * len(repeating))
        period = Fraction(int(repeating), all_nines)
        return (Fraction(int(whole + decimals or "0")) + period) / scale
    exponent = text.lower().partition("e")[2].lstrip("+-")
    if len(exponent) > MAX_EXPONENT_DIGITS:
        raise TooComplexError("an exponent of more than four digits")
    return Fraction(text)

"""A place in a list of tokens, and how deep the reading has gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NoReturn

from rollfeed.rewards.equality.notation.lexer import Token
from rollfeed.rewards.equality.tree import NotMathError, TooComplexError

MAX_DEPTH = 30

_END = Token("end of text", "", False)


class Cursor:
    """Takes tokens one by one."""

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

"""A shell script cut into words and operators, with nothing expanded yet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollfeed.errors import ConfigError

_OPERATOR = re.compile(r"&&|\|\||;;|&>>?|>>|>&|<<<|<<-?|[;&|()<>\n]")
_HEREDOC = re.compile(r"\s*(['\"]?)([\w.-]+)\1")
_CLOSED_BY = {"(": ")", "{": "}"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a word: text that stays, or what is expanded (``$NAME``, ``${...}``, ``$(...)``)."""

    text: str
    is_quoted: bool
    is_expanded: bool = False


@dataclass(frozen=True, slots=True)
class RawWord:
    """Pieces with nothing between them."""

    pieces: tuple[Piece, ...]
    line: int

    @property
    def plain(self) -> str | None:
        """Its text, where nothing in it is quoted or expanded."""
        is_plain = not any(each.is_quoted or each.is_expanded for each in self.pieces)
        return "".join(each.text for each in self.pieces) if is_plain else None


@dataclass(frozen=True, slots=True)
class Operator:
    """A mark between words: an end of a command, a pipe, a parenthesis, a redirection."""

    text: str
    line: int


def words_of(text: str, source: str, *, first_line: int = 1) -> list[RawWord | Operator]:
    """Return the words and operators of a script; comments, continuations and documents in place are gone.

    Raises:
        ConfigError: If a quote or a parenthesis is not closed.
    """
    return list(_Reader(text, source, first_line).read())


class _Reader:
    def __init__(self, text: str, source: str, line: int) -> None:
        self._text = text.replace("\r\n", "\n")
        self._source = source
        self._at = 0
        self._line = line
        self._delimiters: list[str] = []

    def read(self) -> Iterator[RawWord | Operator]:
        while self._at < len(self._text):
            rest = self._text[self._at :] if self._text[self._at] in "\\&|;<>" else self._text[self._at]
            operator = _OPERATOR.match(rest)
            if rest.startswith("\\\n"):
                self._skip(2)
            elif rest[0] in " \t":
                self._skip(1)
            elif rest[0] == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif operator:
                yield Operator(operator[0], self._line)
                self._skip(len(operator[0]))
                self._after(operator[0])
            else:
                line = self._line
                yield RawWord(tuple(self._pieces()), line)

    def _after(self, operator: str) -> None:
        """Remember the end of a document in place, or skip those that a line began."""
        if operator in ("<<", "<<-") and (delimiter := _HEREDOC.match(self._text, self._at)):
            self._delimiters.append(delimiter[2])
        if operator == "\n":
            for delimiter_text in self._delimiters:
                while self._at < len(self._text) and self._whole_line().strip() != delimiter_text:
                    pass
            self._delimiters.clear()

    def _whole_line(self) -> str:
        end = self._text.find("\n", self._at)
        end = len(self._text) if end < 0 else end + 1
        line = self._text[self._at : end]
        self._skip(len(line))
        return line

    def _pieces(self) -> Iterator[Piece]:
        while self._at < len(self._text) and not _is_end(self._text[self._at]):
            letter = self._text[self._at]
            if letter == "'":
                end = self._find("'", self._at + 1)
                yield Piece(self._take(end + 1)[1:-1], is_quoted=True)
            elif letter == '"':
                self._skip(1)
                yield from self._quoted()
            elif letter in "$`":
                yield self._expansion(is_quoted=False)
            elif letter == "\\":
                taken = self._take(self._at + 2)[1:]
                if taken != "\n":
                    yield Piece(taken, is_quoted=True)
            else:
                end = self._at
                while end < len(self._text) and not _is_end(self._text[end]) and self._text[end] not in "'\"$`\\":
                    end += 1
                yield Piece(self._take(end), is_quoted=False)

    def _quoted(self) -> Iterator[Piece]:
        text, line, is_empty = "", self._line, True
        while self._at < len(self._text) and (letter := self._text[self._at]) != '"':
            if letter in "$`":
                if text:
                    yield Piece(text, is_quoted=True)
                yield self._expansion(is_quoted=True)
                text, is_empty = "", False
            elif letter == "\\" and self._text[self._at + 1 : self._at + 2] in ("\n", '"', "$", "`", "\\"):
                text += self._take(self._at + 2)[1:].replace("\n", "")
            else:
                text += self._take(self._at + 1)
        if self._at >= len(self._text):
            raise ConfigError(f'{self._source}:{line}: the " is not closed')
        self._skip(1)
        if text or is_empty:
            yield Piece(text, is_quoted=True)

    def _expansion(self, *, is_quoted: bool) -> Piece:
        """Take ``$NAME``, ``${...}``, ``$(...)`` or what is between backticks."""
        start, opening = self._at, self._text[self._at + 1 : self._at + 2]
        if self._text[start] == "`":
            end = self._find("`", start + 1) + 1
        elif opening in _CLOSED_BY:
            end = self._matching(start + 1)
        else:
            name = re.compile(r"\$(\w+|[@*#?!$-])?").match(self._text, start)
            end = start + len(name[0] if name else "$")
        text = self._take(end)
        return Piece(text, is_quoted, is_expanded=text != "$")

    def _matching(self, start: int) -> int:
        """Return where the parenthesis or brace that opens at ``start`` has been closed."""
        opening, depth, at = self._text[start], 0, start
        while at < len(self._text):
            letter = self._text[at]
            if letter == "\\":
                at += 1
            elif letter == "'" and opening == "(":
                at = self._find("'", at + 1)
            elif letter == opening:
                depth += 1
            elif letter == _CLOSED_BY[opening]:
                depth -= 1
                if depth == 0:
                    return at + 1
            at += 1
        raise ConfigError(f"{self._source}:{self._line}: the {opening} is not closed")

    def _find(self, letter: str, start: int) -> int:
        end = self._text.find(letter, start)
        if end < 0:
            raise ConfigError(f"{self._source}:{self._line}: the {letter} is not closed")
        return end

    def _take(self, end: int) -> str:
        taken = self._text[self._at : end]
        self._skip(len(taken))
        return taken

    def _skip(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count


def _is_end(letter: str) -> bool:
    return letter in " \t\n;&|()<>"


def commands_of(tokens: Sequence[RawWord | Operator]) -> Iterator[tuple[list[RawWord], str]]:
    """Yield simple commands, arrays in their parentheses included, each with the operator behind it."""
    words: list[RawWord] = []
    at, is_redirected = 0, False
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if isinstance(token, RawWord):
            if not is_redirected:
                words.append(token)
            is_redirected = False
        elif token.text == "(" and words and (words[-1].plain or "").endswith("=") and words[-1].line == token.line:
            inner: list[RawWord] = []
            while at < len(tokens) and not (isinstance(tokens[at], Operator) and tokens[at].text == ")"):  # type: ignore[union-attr]
                inner += [each for each in [tokens[at]] if isinstance(each, RawWord)]
                at += 1
            at += 1
            yield [*words, *inner], "=("
            words = []
        elif token.text[0] in "<>" or token.text.startswith("&>"):
            is_redirected = True
            if words and words[-1].plain in ("0", "1", "2"):
                words.pop()
        else:
            yield words, token.text
            words = []
    yield words, ""

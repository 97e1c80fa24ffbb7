r"""From tokens to trees: lists, relations, brackets and matrices; sums and products are in ``expressions``.

A small grammar of what answers look like, read with one token of lookahead in linear time. What it does not
know is an error, never a guess.
"""

from __future__ import annotations

import re

from rollfeed.rewards.equality.notation.expressions import ExpressionParser
from rollfeed.rewards.equality.notation.lexer import COMMA_GROUPED, tokenize
from rollfeed.rewards.equality.notation.literals import MAX_DEPTH
from rollfeed.rewards.equality.tree import (
    Apply,
    Matrix,
    Node,
    NotMathError,
    Number,
    Quantity,
    Relation,
    TooComplexError,
    Values,
)

_RELATIONS = {"=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", "le": "<=", "ge": ">=", "ne": "!=",
              "in": "in", "approx": "=", "equiv": "=", "to": "to", "sim": "="}  # fmt: skip
_SET_OPERATIONS = {"cup": "union", "cap": "intersection", "setminus": "difference"}
_MATRICES = frozenset(["matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array"])
_CLOSING = {"(": (")", "]"), "[": ("]", ")"), "set{": ("set}",)}
_REALS_AFTER = ("in", "(", "-", "infty", ",", "infty", ")")
_BRACKETS = re.compile(r"\\?[{}]|[()\[\]]")
_BEFORE_ARGUMENT = re.compile(r"[A-Za-z}\]^_]")
_CURRENCY = re.compile(r"[-+$\s]*(?:(?P<dollar>\\\$|USD)|(?P<euro>\u20ac|\\euro|EUR))")
_OPEN_ENDED = re.compile(r"(?P<opening>[\[\]])(?P<ends>[^\[\]()]*)(?P<closing>[\[\]])")


def read(text: str) -> list[Node]:
    """Return what an answer may mean: one tree, or two where a comma may group digits or part two numbers.

    Raises:
        NotMathError: If it does not read as mathematics.
        TooComplexError: If it is longer or deeper than any answer.
    """
    text = _with_round_open_ends(text)
    readings = []
    error: NotMathError | None = None
    for comma_groups_digits in (True, False) if COMMA_GROUPED.search(text) else (True,):
        if comma_groups_digits and "," in text and _commas_part_members(text):
            continue
        try:
            tree = Parser(tokenize(text, comma_groups_digits=comma_groups_digits)).parse()
            readings.append(_with_currency(tree, text))
        except NotMathError as failure:
            error = failure
    if not readings:
        raise error or NotMathError("nothing to read")
    return readings


def _commas_part_members(text: str) -> bool:
    """Whether the first comma stands in brackets and none has space after it: ``(1,234)`` is a pair.

    Braces around the argument of a command are no such brackets.
    """
    if ", " in text or COMMA_GROUPED.search(text) is None:
        return False
    opened: list[bool] = []
    for bracket in _BRACKETS.finditer(text, 0, text.index(",")):
        if bracket[0][-1] in "([{":
            is_argument = bracket[0] == "{" and _BEFORE_ARGUMENT.match(text, bracket.start() - 1) is not None
            opened.append(not is_argument)
        elif opened:
            opened.pop()
    return any(opened)


def _with_currency(tree: Node, text: str) -> Node:
    match = _CURRENCY.match(text)
    if match is None or match.lastgroup is None or not isinstance(tree, Number | Apply | Quantity):
        return tree
    value = tree.value if isinstance(tree, Quantity) else tree
    return Quantity(value, match.lastgroup if not isinstance(tree, Quantity) else tree.unit or match.lastgroup)


def _with_round_open_ends(text: str) -> str:
    """Return the text with intervals written ``]0,1[`` as ``(0,1)``."""
    if text.count("]") == text.count("[") and "]" not in text.partition("[")[0] and "[" not in text.rpartition("]")[2]:
        return text

    def rounded(match: re.Match[str]) -> str:
        if "," not in match["ends"] and ";" not in match["ends"]:
            return match[0]
        opening, closing = "(" if match["opening"] == "]" else "[", ")" if match["closing"] == "[" else "]"
        return f"{opening}{match['ends']}{closing}"

    return _OPEN_ENDED.sub(rounded, text)


class Parser(ExpressionParser):
    """Reads one answer."""

    def parse(self) -> Node:
        """Return the tree of all tokens, without "Answer:" or a sign of equality before it."""
        if self.peek().kind == "words" and self.peek().text.endswith(":"):
            self.advance()
        self.take("=", "approx", "sim")
        tree = self.list_of_values()
        if not self.at_end():
            raise NotMathError(f"did not expect {self.peek_kind()!r}")
        return tree

    def list_of_values(self) -> Node:
        """Read values; a list that holds "and" has it as its closing, since inequalities then hold together."""
        members, closing = [self.relation()], ""
        while (separator := self.take(",", ";", "or")) is not None:
            while separator is not None:  # ", or" is one separator
                closing = "and" if separator.text in ("and", "land") else closing
                separator = self.take(",", ";", "or")
            if self.at_end():
                break
            members.append(self.relation())
        return members[0] if len(members) == 1 else Values("", closing, tuple(members))

    def relation(self) -> Node:
        token = self.peek()
        is_name = token.kind == "words" or (token.kind == "letters" and (len(token.text) > 3 or token.text.isupper()))
        if is_name and len(token.text) > 1 and self.peek_kind(1) == "=":  # "Area = 5" means 5
            self.advance()
            self.advance()
        sides, operators = [self.union()], []
        while (operator := _RELATIONS.get(self.peek_kind())) is not None:
            self.advance()
            operators.append(operator)
            sides.append(self.union())
        return Relation(tuple(operators), tuple(sides)) if operators else sides[0]

    def union(self) -> Node:
        tree = self.sum()
        for _ in range(MAX_DEPTH):
            operation = _SET_OPERATIONS.get(self.peek_kind())
            if operation is None:
                return tree
            self.advance()
            tree = Apply(operation, (tree, self.sum()))
        raise TooComplexError(f"a union of more than {MAX_DEPTH} parts")

    def bracketed(self) -> Node:
        opening = self.advance()
        with self.deeper():
            if opening.kind == "set{" and self.take("set}"):
                return Values("{", "}", ())
            if opening.kind == "set{" and self._takes_set_builder():
                inner = self.list_of_values()
                self.expect("set}")
                return inner
            inner = self.list_of_values()
            closing = self.take(*_CLOSING[opening.kind])
            if closing is None:
                raise NotMathError(f"{opening.text!r} is not closed")
        bare_list = isinstance(inner, Values) and not inner.opening
        members = inner.members if isinstance(inner, Values) and bare_list else (inner,)
        if opening.kind == "set{":
            return Values("{", "}", members)
        if isinstance(inner, Relation) or bare_list:
            return Values(opening.kind, closing.kind, members)
        return inner if closing.kind == _CLOSING[opening.kind][0] else self.fail("a half open interval has two ends")

    def _takes_set_builder(self) -> bool:
        r"""Take ``x |`` or ``x \in \mathbb{R} :`` after the brace of a set."""
        length = 1 + len(_REALS_AFTER) if self._is_among_reals() else 1
        if self.peek().kind != "letters" or self.peek_kind(length) not in ("|", ":"):
            return False
        for _ in range(length + 1):
            self.advance()
        return True

    def _is_among_reals(self) -> bool:
        return tuple(self.peek_kind(1 + place) for place in range(len(_REALS_AFTER))) == _REALS_AFTER

    def braced(self) -> Node:
        self.expect("{")
        with self.deeper():
            if self.take("}"):
                raise NotMathError("empty braces")
            inner = self.list_of_values()
            self.expect("}")
        if isinstance(inner, Values) and not inner.opening:
            return Values("{", "}", inner.members)
        return inner

    def matrix(self) -> Node:
        name = self.advance().text
        if name.rstrip("*") not in _MATRICES:
            raise NotMathError(f"environment {name} is not read")
        rows: list[tuple[Node, ...]] = []
        with self.deeper():
            while not self.take("end"):
                cells = [self.relation()]
                while self.take("&"):
                    cells.append(self.relation())
                rows.append(tuple(cells))
                if not self.take("row") and self.peek_kind() != "end":
                    raise NotMathError("a matrix is not closed")
        return Matrix(tuple(rows))

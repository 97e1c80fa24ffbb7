"""Reads the flags out of a shell script as a shell would pass them, without running anything.

Variables, arrays, defaults, arithmetic, ``source``, ``if`` and ``for`` are followed. What only running could tell, such
as the output of a program, stays as it is written, and a condition that hangs on it takes its first branch; both are
noted.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from rollfeed.compat.convert.shell_scripts.shell_words import Piece, RawWord, commands_of, words_of
from rollfeed.compat.convert.table import FLAGS
from rollfeed.errors import ConfigError

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_PARAMETER = re.compile(r"\$\{?(?P<name>\w+|[@*#?!$-])(?:\[(?P<index>[^]]*)\])?(?P<rest>.*?)\}?$", re.DOTALL)
_DECLARING = ("export", "local", "readonly", "declare", "typeset")
_COMPARISONS: Mapping[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "-eq": lambda one, other: int(one) == int(other),
    "-ne": lambda one, other: int(one) != int(other),
    "-lt": lambda one, other: int(one) < int(other),
    "-le": lambda one, other: int(one) <= int(other),
    "-gt": lambda one, other: int(one) > int(other),
    "-ge": lambda one, other: int(one) >= int(other),
}
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}
Commands: TypeAlias = "list[tuple[list[RawWord], str]]"
"""Simple commands, each with the operator behind it."""
_DEEPEST = 8
"""Scripts that source scripts."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word as a program is given it, and where it was written."""

    text: str
    where: str


@dataclass(slots=True)
class Script:
    """The words that a script passes to a program, and what could not be told."""

    words: list[Word] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    runs_async: bool = False
    """Whether it runs a ``train_async`` program, which generates while it trains."""


def read_script(text: str, *, source: str, folder: Path | None = None) -> Script:
    """Return the flags of the command in a script, or of a line of flags, that has the most of slime's.

    ``source`` names it in errors; ``folder`` is where it lies, None for flags.

    Raises:
        ConfigError: If it is not closed somewhere, or has none of slime's flags.
    """
    shell = _Shell(folder)
    shell.run(text, source)
    found = Script(notes=shell.notes)
    best = max(shell.commands, key=_num_flags, default=[])
    if not _num_flags(best):  # only arrays, for a command that stands elsewhere
        best = [word for name in shell.arrays for word in shell.variables[name]]
    if not _num_flags(best):
        raise ConfigError(f"{source}: there are no flags of slime's in it; give a script that runs train.py, or flags")
    program = next((number for number, word in enumerate(best) if re.search(r"\.py$", word.text)), None)
    first = next((number for number, word in enumerate(best) if _is_flag(word.text)), 0)
    start = first if program is None else program + 1
    found.words = best[start:]
    found.notes += [
        f"{word.where}: {word.text}: only the shell that runs it knows what this is"
        for word in found.words
        if re.search(r"\$[({\w]|`", word.text)
    ]
    found.runs_async = program is not None and "async" in Path(best[program].text).name
    others = [each for each in shell.commands if each is not best and _num_flags(each) > 1]
    found.notes += [f"{each[0].where}: another command with flags of slime's; only one is converted" for each in others]
    return found


def _is_flag(text: str) -> bool:
    return text.startswith("--") and text[2:].partition("=")[0] in FLAGS


def _num_flags(words: Sequence[Word]) -> int:
    return sum(_is_flag(word.text) for word in words)


@dataclass(slots=True)
class _Branch:
    """A construct that is open: which of its bodies is read."""

    is_read: bool
    was_read: bool
    is_outer_read: bool
    subject: str | None = None
    patterns: list[str] | None = None
    """Of a case, those before the next body; None within a body."""


def _match(branch: _Branch, patterns: Sequence[str], *, is_last: bool) -> None:
    """Take patterns of a case; the last one decides whether its body is read."""
    known = branch.patterns = [*(branch.patterns or []), *patterns]
    if is_last:
        branch.is_read = branch.is_outer_read and not branch.was_read and bool({"*", branch.subject} & set(known))
        branch.was_read |= branch.is_read
        branch.patterns = None


class _Shell:
    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.variables: dict[str, list[Word]] = {}
        self.arrays: list[str] = []
        self.commands: list[list[Word]] = []
        self.notes: list[str] = []
        self.functions: dict[str, Commands] = {}
        self._source = ""
        self._depth = 0
        """Scripts within scripts that are followed now."""

    def run(self, text: str, source: str) -> None:
        """Follow a script."""
        outer, self._source = self._source, source
        self._depth += 1
        self._follow(list(commands_of(words_of(text, source))))
        self._depth -= 1
        self._source = outer

    def _follow(self, commands: Commands) -> None:
        """Follow commands one after another; functions are followed where they are called."""
        branches: list[_Branch] = []
        skips, status = False, None
        at = 0
        while at < len(commands):
            if (end := self._function(commands, at)) is not None:
                at = end
                continue
            words, ending = commands[at]
            at += 1
            words, negated = self._keywords(words, branches, ending)
            is_read = not branches or branches[-1].is_read
            if words and is_read and not skips:
                status = self._command(words, is_array=ending == "=(")
                status = (not status) if negated and status is not None else status
                if branches and branches[-1].subject == "condition":
                    self._decide(branches[-1], status, words[0])
            if ending == ";;" and branches:
                branches[-1].is_read, branches[-1].patterns = False, []
            skips = (ending == "&&" and status is False) or (ending == "||" and status is not False)

    def _function(self, commands: Commands, at: int) -> int | None:
        """Keep the body of a function that is defined here, and return where it ends; None where none is."""
        words, ending = commands[at]
        is_named = len(words) == 1 and ending == "(" and commands[at + 1 : at + 2] == [([], ")")]
        if not is_named and not (len(words) > 1 and words[0].plain == "function"):
            return None
        name = words[0 if is_named else 1].plain or ""
        start = end = at + 2 if is_named or ending == "(" else at
        while end < len(commands) and not (commands[end][0] and commands[end][0][0].plain == "}"):
            end += 1
        body = commands[start:end]
        if body and is_named is False and start == at:
            body[0] = (words[2:], ending)
        self.functions[name] = body
        return end + 1

    def _keywords(self, words: list[RawWord], branches: list[_Branch], ending: str) -> tuple[list[RawWord], bool]:
        """Open and close constructs; return what is left of a command, and whether ``!`` stands before it."""
        negated = False
        while words:
            is_read = not branches or branches[-1].is_read
            keyword = words[0].plain
            if keyword == "if":
                branches.append(_Branch(is_read, False, is_read, "condition"))
            elif keyword == "elif" and branches:
                branches[-1].is_read = branches[-1].is_outer_read and not branches[-1].was_read
                branches[-1].subject = "condition"
            elif keyword == "then" and branches:
                branches[-1].subject = None
            elif keyword == "else" and branches:
                branches[-1].is_read = branches[-1].is_outer_read and not branches[-1].was_read
            elif keyword == "case" and len(words) > 2:
                subject = "".join(word.text for word in self._expand(words[1]))
                branches.append(_Branch(False, False, is_read, subject, []))
                words = words[2:]
            elif keyword in ("fi", "esac") and branches:
                branches.pop()
            elif keyword == "for" and len(words) > 3:
                if is_read:
                    self.variables[str(words[1].plain)] = self._expand(words[3])[:1]
                return [], False
            elif keyword == "!":
                negated = True
            elif keyword not in ("do", "done", "while", "until", "{", "}", "function", "time", "in"):
                break
            words = words[1:]
        if branches and branches[-1].patterns is not None and ending in ("|", ")"):
            _match(branches[-1], [word.plain or "" for word in words], is_last=ending == ")")
            return [], False
        return words, negated

    def _decide(self, branch: _Branch, status: bool | None, word: RawWord) -> None:
        if status is None:
            self.notes.append(
                f"{self._source}:{word.line}: only running it tells this condition; its first branch is read"
            )
        branch.is_read = branch.is_outer_read and status is not False
        branch.was_read |= branch.is_read

    def _command(self, words: list[RawWord], *, is_array: bool) -> bool | None:
        """Follow one command; return its status: None where that cannot be told."""
        if words[0].plain in _DECLARING:
            words = words[1:]
            while words and (words[0].plain or "").startswith("-"):
                words = words[1:]
        while words and (assigned := _ASSIGNED.match(words[0].pieces[0].text)) and not words[0].pieces[0].is_quoted:
            self._assign(assigned, words[0], words[1:] if is_array else None)
            if is_array:
                return True
            words = words[1:]
        unset = "" if words and words[0].plain in ("[", "[[", "test") else None
        given = [each for word in words for each in self._expand(word, unset=unset)]
        if not given:
            return True
        name = given[0].text
        if name in ("source", ".") and len(given) > 1:
            return self._include(given[1])
        if name in ("[", "[[", "test"):
            return self._test([each.text for each in given[1:] if each.text not in ("]", "]]")])
        if name in ("true", "false", ":"):
            return name != "false"
        if name in self.functions and self._depth < _DEEPEST:
            self._call(self.functions[name], given[1:])
            return True
        inner = next((each for each in given if " --" in each.text and ".py" in each.text), None)
        if inner is not None and self._depth < _DEEPEST:
            self.run(inner.text, inner.where.rpartition(":")[0] or self._source)
        if self._source and name.startswith("--") and self.folder is not None:
            self.notes.append(
                f"{given[0].where}: {name} is a command of its own; does a \\ miss, or a comment end the line?"
            )
        else:
            self.commands.append(given)
        return True if name in ("echo", "cd", "set", "mkdir") else None

    def _call(self, body: Commands, arguments: list[Word]) -> None:
        outer = {name: words for name, words in self.variables.items() if name == "@" or name.isdigit()}
        numbered = {str(number): [word] for number, word in enumerate(arguments, start=1)}
        self.variables |= {"@": arguments, **numbered}
        self._depth += 1
        self._follow(body)
        self._depth -= 1
        for name in ("@", *numbered):
            self.variables.pop(name, None)
        self.variables |= outer

    def _assign(self, assigned: re.Match[str], word: RawWord, items: list[RawWord] | None) -> None:
        name, adds = assigned[1], bool(assigned[2])
        if items is not None:
            found = [each for item in items for each in self._expand(item)]
            if name not in self.arrays:
                self.arrays.append(name)
        else:
            first = Piece(word.pieces[0].text[assigned.end() :], is_quoted=True)
            rest = [Piece(each.text, True, each.is_expanded) for each in word.pieces[1:]]
            found = self._expand(RawWord((first, *rest), word.line)) or [self._word("", word.line)]
        if adds and name in self.variables and items is None:
            before = self.variables[name][0] if self.variables[name] else self._word("", word.line)
            found = [Word(before.text + found[0].text, found[0].where)]
        elif adds:
            found = self.variables.get(name, []) + found
        self.variables[name] = found

    def _include(self, named: Word) -> bool | None:
        places = [Path(named.text), *([self.folder / named.text] if self.folder else [])]
        path = next((each for each in places if each.is_file()), None)
        if path is None or self._depth >= _DEEPEST:
            self.notes.append(f"{named.where}: {named.text} is not here; what it sets is missing")
            return None
        self.run(path.read_text(encoding="utf-8", errors="replace"), str(path))
        return True

    def _test(self, terms: list[str]) -> bool | None:
        if any("$" in term or "`" in term for term in terms) or any(term in ("-a", "-o") for term in terms):
            return None
        if terms[:1] == ["!"]:
            status = self._test(terms[1:])
            return None if status is None else not status
        if len(terms) == 2 and terms[0] in ("-z", "-n"):
            return (terms[1] == "") == (terms[0] == "-z")
        if len(terms) == 2 and terms[0] in ("-f", "-d", "-e"):
            return Path(terms[1]).exists()
        if len(terms) == 3 and terms[1] in _COMPARISONS:
            try:
                return _COMPARISONS[terms[1]](terms[0], terms[2])
            except ValueError:
                return None
        return bool(terms[0]) if len(terms) == 1 else None

    def _expand(self, raw: RawWord, *, unset: str | None = None) -> list[Word]:
        """Return the words that one becomes: none where nothing is left, several of an array or a text with blanks."""
        done: list[Word] = []
        text: str | None = None
        where = f"{self._source}:{raw.line}"
        for piece in raw.pieces:
            if not piece.is_expanded:
                text = (text or "") + piece.text
                continue
            values = self._values(piece.text, raw.line, unset)
            is_array = "[@]" in piece.text or piece.text == "$@"
            if piece.is_quoted and not is_array:
                text = (text or "") + " ".join(each.text for each in values)
                continue
            whole = piece.is_quoted or [each.text for each in values] == [piece.text]
            parts = [
                Word(part, each.where) for each in values for part in ([each.text] if whole else each.text.split())
            ]
            for number, part in enumerate(parts):
                if number and text is not None:
                    done.append(Word(text, where))
                    text = None
                text = (text or "") + part.text
                where = part.where if len(raw.pieces) == 1 and (is_array or len(parts) > 1) else where
        return done if text is None else [*done, Word(text, where)]

    def _values(self, text: str, line: int, unset: str | None) -> list[Word]:
        """Return what ``$NAME``, ``${...}`` or ``$(...)`` stands for; as it is written where only running it tells."""
        as_written = self._word(text, line)
        if text.startswith("$(("):
            return [self._word(self._calculated(text[3:-2], line), line)]
        if text.startswith(("$(", "`")):
            if self.folder is not None and ("BASH_SOURCE" in text or "$0" in text or "realpath" in text):
                base = self.folder.resolve()
                return [self._word(str(base.parent if "/.." in text else base), line)]
            return [self._word(str(Path.cwd()), line)] if text.strip("$()` ") == "pwd" else [as_written]
        found = _PARAMETER.match(text)
        if found is None:
            return [as_written]
        name, index, rest = found["name"], found["index"], found["rest"]
        values = self.variables.get(name, [Word(os.environ[name], "")] if name in os.environ else None)
        if values is not None and index not in (None, "@", "*"):
            values = values[int(index) : int(index) + 1] if index.isdigit() else values
        elif values is not None and index is None and name not in "@*":
            values = values[:1]
        is_empty = not values or not any(each.text for each in values)
        form = re.match(r"(:?)([-=?+])(.*)", rest, re.DOTALL)
        if form is not None:
            is_missing = is_empty if form[1] else values is None
            if (form[2] == "+") == is_missing:
                return [] if form[2] == "+" else values or []
            other = form[3].strip("\"'") if form[2] != "?" else ""
            inner = words_of(other, self._source, first_line=line)
            found_words = [
                each for word in inner if isinstance(word, RawWord) for each in self._expand(word, unset=unset)
            ]
            if form[2] == "=":
                self.variables[name] = [self._word(" ".join(each.text for each in found_words), line)]
            return found_words
        if rest in ("##*/", "%/*") and values:
            return [Word(each.text.rpartition("/")[2 if rest == "##*/" else 0], each.where) for each in values]
        if values is None and (unset is not None or not name.isidentifier()):
            return [self._word(unset, line)] if unset is not None else []
        return [as_written] if values is None or rest else values

    def _calculated(self, text: str, line: int) -> str:
        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: self._plain_number(name[1], line), text)
        try:
            return str(_calculate(ast.parse(filled.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return f"$(({text}))"

    def _plain_number(self, name: str, line: int) -> str:
        return "".join(each.text for each in self._values(f"${name}", line, unset="0"))

    def _word(self, text: str, line: int) -> Word:
        return Word(text, f"{self._source}:{line}")


def _calculate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return int(_ARITHMETIC[type(node.op)](_calculate(node.left), _calculate(node.right)))
    raise ValueError(f"{ast.dump(node)} is no arithmetic of a shell")

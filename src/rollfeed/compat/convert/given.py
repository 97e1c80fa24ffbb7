"""Flags with their values, as slime's own command line would read them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollfeed.compat.convert.shell_scripts import Word
from rollfeed.compat.convert.table import FLAGS, PREFIXES, UNKNOWN, Flag
from rollfeed.errors import ConfigError, suggestion


@dataclass(frozen=True, slots=True)
class Given:
    """A flag that was given."""

    name: str
    texts: tuple[str, ...]
    """As they were written."""
    value: Any
    """As the flag's type is: a number, a text, a list, what JSON says; True or False without a value."""
    where: str
    """File and line; empty for flags that are in no file."""

    def __str__(self) -> str:
        texts = ("<key>",) if self.name == "wandb-key" else self.texts
        return " ".join([f"--{self.name}", *map(_quoted, texts)])


def _quoted(text: str) -> str:
    is_plain = text and not any(letter in text for letter in " \t\n\"'")
    return text if is_plain else "'" + " ".join(text.split("\n")) + "'"


def wrong(given: Given, problem: str) -> ConfigError:
    """Return what is raised for a flag that is wrong."""
    return ConfigError(f"{given.where + ': ' if given.where else ''}{given}: {problem}")


class Flags(Mapping[str, Given]):
    """The flags of a command that the table knows, the last where one is given twice."""

    def __init__(self, words: Sequence[Word], *, in_file: bool) -> None:
        """Read them. Raises ConfigError if a value misses, is too much or of the wrong kind."""
        self.others: list[tuple[Given, str]] = []
        """Flags that the table does not know, and why they are not carried over."""
        self.notes: list[str] = []
        self._given: dict[str, Given] = {}
        self._in_file = in_file
        at = 0
        while at < len(words):
            at = self._read(words, at)

    def __getitem__(self, name: str) -> Given:
        return self._given[name]

    def __iter__(self) -> Any:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def value(self, name: str) -> Any:
        """Return the value of a flag, else its default; None where it has none.

        Raises:
            KeyError: If there is no such flag.
        """
        flag = FLAGS[name]
        if name in self._given:
            return self._given[name].value
        if flag.default == "" or flag.takes in ("texts", "ints", "append"):
            return None
        return flag.default == "true" if flag.takes in ("flag", "bool", "opt") else _typed(flag, flag.default)

    def merge(self, values: Mapping[str, Any], where: Callable[[str], str]) -> None:
        """Take values of a file before those that were given; keys that are no flags, with underscores, are left."""
        for key, value in values.items():
            name = key.replace("_", "-")
            listed = value if isinstance(value, list) else [value]
            texts = tuple(each if isinstance(each, str) else json.dumps(each) for each in listed)
            flag = FLAGS.get(name)
            if flag is None:
                continue
            if flag.takes in ("flag", "bool"):
                self._given[name] = Given(name, (), bool(value), where(key))
            elif value is not None:
                self._given[name] = self._typed_given(flag, texts, where(key))

    def _read(self, words: Sequence[Word], at: int) -> int:
        """Read the flag at ``at``; return where the next one is."""
        word = words[at]
        where = word.where if self._in_file else ""
        if not word.text.startswith("--") or word.text == "--":
            if "$" not in word.text and word.text != "--":
                raise ConfigError(f"{where + ': ' if where else ''}{word.text!r} belongs to no flag: remove it")
            return at + 1
        name, equals, attached = word.text[2:].partition("=")
        end = at + 1
        while end < len(words) and not words[end].text.startswith("--"):
            end += 1
        is_off = name.startswith("no-") and name not in FLAGS and getattr(FLAGS.get(name[3:]), "takes", "") == "bool"
        flag = FLAGS.get(name[3:] if is_off else name)
        if flag is None:
            texts = tuple(each.text for each in words[at + 1 : end])
            given = Given(name, ((attached,) if equals else ()) + texts, None, where)
            self.others.append((given, _reason(name)))
            return end
        limit = {"flag": 0, "bool": 0, "texts": None, "ints": None}.get(flag.takes, 1)
        count = 0 if equals else (end - at - 1 if limit is None else min(limit, end - at - 1))
        if flag.takes == "opt" and count and words[at + 1].text not in ("v1", "v2", "True", "False"):
            count = 0
        texts = (attached,) if equals else tuple(each.text for each in words[at + 1 : at + 1 + count])
        self._keep(flag, texts, where, is_off=is_off)
        return at + 1 + count

    def _keep(self, flag: Flag, texts: tuple[str, ...], where: str, *, is_off: bool) -> None:
        before = self._given.get(flag.name)
        if flag.takes in ("flag", "bool", "opt") and not texts:
            self._given[flag.name] = Given(flag.name if not is_off else f"no-{flag.name}", (), not is_off, where)
            return
        given = self._typed_given(flag, texts, where)
        if before is not None and flag.takes == "append":
            given = Given(flag.name, before.texts + texts, [*before.value, *given.value], where)
        elif before is not None and before.value != given.value:
            self.notes.append(f"{before} is given again as {given}; the last one counts")
        self._given[flag.name] = given

    def _typed_given(self, flag: Flag, texts: tuple[str, ...], where: str) -> Given:
        given = Given(flag.name, texts, None, where)
        if flag.takes in ("flag", "bool"):
            raise wrong(given, "takes no value: remove it")
        if not texts:
            raise wrong(given, "its value misses: add one")
        try:
            several = flag.takes in ("texts", "ints", "append")
            value = [_typed(flag, text) for text in texts] if several else _typed(flag, texts[0])
        except ValueError as error:
            raise wrong(given, str(error)) from None
        return Given(flag.name, texts, value, where)


def _typed(flag: Flag, text: str) -> Any:
    if flag.takes == "json":
        try:
            return json.loads(text)
        except ValueError:
            raise ValueError('is not JSON: quote it as \'{"key": "value"}\'') from None
    kind = {"int": int, "ints": int, "float": float}.get(flag.takes)
    if kind is None:
        return text
    try:
        number = kind(text)
    except ValueError:
        raise ValueError(f"is not {'an integer' if kind is int else 'a number'}") from None
    if not math.isfinite(number):
        raise ValueError("is not a finite number")
    return number


def _reason(name: str) -> str:
    for prefix, reason in PREFIXES.items():
        if name.startswith(prefix):
            return reason
    near = suggestion(name, FLAGS, otherwise="")
    return f"{UNKNOWN}; {near}" if near and _is_near(name, near) else UNKNOWN


def _is_near(name: str, said: str) -> bool:
    """Whether a suggestion is the same word but for a letter or a dash."""
    other = said.removeprefix("did you mean ").removesuffix("?")
    return abs(len(other) - len(name)) <= 2 and _letters(name) == _letters(other)


def _letters(name: str) -> Iterable[str]:
    return sorted(set(name) - {"-", "_"})

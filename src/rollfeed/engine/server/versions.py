"""Weight versions: strings on the wire, integers inside."""

from __future__ import annotations

DEFAULT_VERSION = "default"
_FIRST_NAMED = 1 << 48
"""Versions that are not numbers count up from here, where no number of training steps reaches."""


class WeightVersions:
    """Maps both ways: ``default`` is 0, digits are that integer, other names get integers of their own."""

    def __init__(self) -> None:
        self._name_of: dict[int, str] = {0: DEFAULT_VERSION}
        self._number_of: dict[str, int] = {DEFAULT_VERSION: 0}
        self._next_number = _FIRST_NAMED

    def number(self, name: str) -> int:
        """Return the integer of a version's name, which :meth:`name` will give back."""
        number = self._number_of.get(name)
        if number is None:
            number = int(name) if name.isascii() and name.isdigit() and len(name) <= _MAX_DIGITS else self._new_number()
            self._number_of[name] = number
        self._name_of[number] = name
        return number

    def name(self, number: int) -> str:
        """Return the name that an integer was last given, else its digits."""
        return self._name_of.get(number, str(number))

    def _new_number(self) -> int:
        self._next_number += 1
        return self._next_number


_MAX_DIGITS = len(str(_FIRST_NAMED)) - 1

"""The program inside a response."""

from __future__ import annotations

from rollfeed.answers import find_code

_PYTHON = ("", "python", "python3", "py", "py3", "cpython")
MAX_CHARS = 100_000
"""A longer program is none."""


def find_program(response: str) -> str | None:
    """Return the last fenced block of Python, or None.

    Only the text after the reasoning is read. A fence that never closes means that the response was cut off, so that
    its last block is no program, whatever came before.
    """
    found = find_code(response.replace("\r\n", "\n"), languages=_PYTHON)
    return found if found is not None and found.strip() and len(found) <= MAX_CHARS else None

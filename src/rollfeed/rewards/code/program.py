"""The program inside a response."""

from __future__ import annotations

import re

_FENCE = re.compile(r"^[ \t]*(?P<ticks>`{3,}|~{3,})[ \t]*(?P<info>[^\n`]*)$", re.MULTILINE)
_PYTHON = {"", "python", "python3", "py", "py3", "cpython", "python 3"}
MAX_CHARS = 100_000
"""A longer program is none."""


def find_program(response: str) -> str | None:
    """Return the last fenced block of Python, or None.

    Only the text after the reasoning is read. A fence that never closes means that the response was cut off, so that
    its last block is no program, whatever came before.
    """
    text = response[response.rfind("</think>") + len("</think>") :] if "</think>" in response else response
    text = text.partition("<think>")[0].replace("\r\n", "\n")
    found: str | None = None
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif not fence["info"].strip() and fence["ticks"].startswith(opening["ticks"]):
            if opening["info"].strip().lower() in _PYTHON:
                found = text[opening.end() + 1 : fence.start()]
            opening = None
    if opening is not None or found is None or not found.strip() or len(found) > MAX_CHARS:
        return None
    return found

r"""Text that every file, pipe and tokenizer takes.

A lone surrogate is half of a character beyond U+FFFF, as ``"\ud83d"`` alone in a JSON file: UTF-8 has no form for it.
It becomes U+FFFD, the replacement character, wherever text comes in and wherever it is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any


def well_formed(text: str) -> str:
    """Return the text with U+FFFD in place of every lone surrogate."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def well_formed_json(value: Any) -> Any:
    """Return a JSON value whose texts, keys included, are :func:`well_formed`."""
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, Mapping):
        return {well_formed_json(key): well_formed_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(well_formed_json(each) for each in value)
    return value


def text_of(content: Any) -> str:
    """Return the content of a message as one text: that of its parts, joined as they are."""
    if not isinstance(content, list | tuple):
        return "" if content is None else str(content)
    return "".join(str(part.get("text") or "") if isinstance(part, Mapping) else str(part) for part in content)


def template_fields(template: str) -> list[tuple[str, str | None]]:
    """Return the pieces of a template such as ``"Q: {question}"``: each a text, and the name behind it or None.

    Raises:
        ValueError: If its braces are not those of names; ``{{`` and ``}}`` are braces of the text.
    """
    remedy = "write {name} for a column, and {{ or }} for a brace of the text, as in \\boxed{{}}"
    try:
        pieces = [(text, name, more, how) for text, name, more, how in Formatter().parse(template)]
    except ValueError as error:
        raise ValueError(f"{error}: {remedy}") from None
    for _, name, more, how in pieces:
        if name is not None and (not name.strip() or more or how):
            raise ValueError(
                f"{{{name}{'!' * bool(how)}{how or ''}{':' * bool(more)}{more}}} names no column: {remedy}"
            )
    return [(text, name) for text, name, _, _ in pieces]


def held_back(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a count in words for people: ``1 step``, ``1,000 steps``; ``plural`` is where an s is not enough."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def step_range(first: int, last: int) -> str:
    """Return steps from the first to the last, for people: ``step 0``, ``steps 0 to 3``."""
    return f"step {first}" if first == last else f"steps {first} to {last}"

"""Settings as the text of a TOML file, with a comment on each line that says which flag it comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Setting:
    """A value, and what it comes from."""

    value: Any
    origin: str
    flags: tuple[str, ...] = ()
    """Names of the flags that it comes from."""


def nested(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return dotted keys as nested dictionaries; numbers among their parts are entries of lists."""
    tree: dict[str, Any] = {}
    for key, setting in settings.items():
        at: Any = tree
        *parents, last = key.split(".")
        for part, following in zip(parents, [*parents, last][1:], strict=True):
            empty: Any = [] if following.isdigit() else {}
            if isinstance(at, list):
                at.extend({} for _ in range(int(part) + 1 - len(at)))
                at = at[int(part)]
            else:
                at = at.setdefault(part, empty)
        if isinstance(at, list):
            at.append(setting.value)
        else:
            at[last] = setting.value
    return tree


def settings_text(settings: Mapping[str, Setting]) -> str:
    """Return the tables of a settings file; keys of one table stand together."""
    tables: dict[str, list[str]] = {"": []}
    for key, setting in settings.items():
        table, _, name = key.rpartition(".")
        line = f"{name} = {value_text(setting.value)}"
        tables.setdefault(table, []).append(f"{line}  # {setting.origin}" if setting.origin else line)
    return "\n\n".join(_texts(tables)) + "\n"


def _texts(tables: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for table, lines in tables.items():
        parent, _, last = table.rpartition(".")
        if not lines:
            continue
        if table:
            yield "\n".join([f"[[{parent}]]" if last.isdigit() else f"[{table}]", *lines])
        else:
            yield "\n".join(lines)


def value_text(value: Any) -> str:
    """Return a value as TOML writes it; tables in one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {value_text(each)}" for key, each in value.items() if each is not None)
        return "{ " + inner + " }" if inner else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(value_text, value)) + "]"
    return repr(value)


def _key(text: str) -> str:
    return text if text.isascii() and text.replace("_", "").replace("-", "").isalnum() else json.dumps(text)

"""Reads and checks the fields of a prompt in a row of a prompt file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollfeed.prompts.messages import kind_of, read_message, read_tools
from rollfeed.types import Message
from rollfeed.types.text import template_fields, well_formed_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnKeys:
    """The columns of a prompt file; None means that there is none."""

    input_key: str = "prompt"
    """Text, or a list of chat messages."""
    template: str | None = None
    """Text with columns in it, as ``{question}``, in place of ``input_key``."""
    label_key: str | None = None
    metadata_key: str | None = None
    """An object, or its JSON text. Rows may leave it out."""
    metadata_columns: tuple[str, ...] = ()
    """Further columns, each an entry of the metadata. Rows may leave them out."""
    tools_key: str | None = None
    """A list of objects, or its JSON text. Rows may leave it out."""
    image_key: str | None = None
    """Pictures, or one. Rows may leave it out."""
    video_key: str | None = None
    """Videos, or one. Rows may leave it out."""

    def named(self) -> list[tuple[str, str]]:
        """Return the settings that name columns in use, and these."""
        keys = ("label_key", "metadata_key", "tools_key", "image_key", "video_key")
        named = [(key, value) for key in keys if (value := getattr(self, key)) is not None]
        named += [("metadata_columns", name) for name in self.metadata_columns]
        if self.template is None:
            return [("input_key", self.input_key), *named]
        return [*(("template", name) for _, name in template_fields(self.template) if name is not None), *named]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFields:
    """The fields of one row."""

    content: str | tuple[Message, ...]
    label: Any
    metadata: Mapping[str, Any]
    tools: tuple[Mapping[str, Any], ...] | None
    images: tuple[Any, ...]
    """As they were given: paths, URLs, data URIs, bytes or mappings with one of these."""
    videos: tuple[Any, ...]


def read_fields(record: Mapping[str, Any], keys: ColumnKeys, *, is_chat: bool) -> RowFields:
    """Return the fields of a row.

    ``is_chat`` says whether text that is the JSON of messages stands for them.

    Raises:
        ValueError: If a column is missing or holds something else; says which and what.
    """
    if keys.template is None:
        content = _read_content(_require(record, "input_key", keys.input_key), keys.input_key, is_chat=is_chat)
    else:
        content = "".join(
            text + ("" if name is None else _as_text(_require(record, "template", name)))
            for text, name in template_fields(keys.template)
        )
    return RowFields(
        content=content,
        label=None if keys.label_key is None else _read_label(record, keys.label_key),
        metadata={**_read_metadata(record, keys.metadata_key), **_read_columns(record, keys.metadata_columns)},
        tools=_read_tools(record, keys.tools_key),
        images=_read_media(record, keys.image_key),
        videos=_read_media(record, keys.video_key),
    )


def _require(record: Mapping[str, Any], setting: str, key: str) -> Any:
    if key not in record:
        raise ValueError(f"no column {key!r} ({setting}); the row has {', '.join(map(str, record)) or 'none'}")
    if record[key] is None:
        raise ValueError(f"column {key!r} ({setting}) is null")
    return record[key]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _read_columns(record: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    found = {name: record[name] for name in columns if name in record}
    for name, value in found.items():
        _check_json(value, name)
    return found


def _read_content(value: Any, key: str, *, is_chat: bool) -> str | tuple[Message, ...]:
    if isinstance(value, str) and is_chat:
        value = _messages_in(value)
    if isinstance(value, str):
        if not value:
            raise ValueError(f"column {key!r} is empty")
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"column {key!r} must be a text or a list of messages, is {kind_of(value)}")
    return tuple(read_message(message, f"message {index} of column {key!r}") for index, message in enumerate(value))


def _messages_in(text: str) -> Any:
    """Return the messages that a text is the JSON of; any other text as it is."""
    if not text.lstrip().startswith("[") or '"role"' not in text:
        return text
    try:
        found = _loaded(text)
    except (ValueError, RecursionError):
        return text
    is_messages = bool(found) and all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in found)
    return found if is_messages else text


def _read_label(record: Mapping[str, Any], key: str) -> Any:
    label = record.get(key)  # whether one is needed depends on who scores the row
    _check_json(label, key)
    return label


def _read_metadata(record: Mapping[str, Any], key: str | None) -> Mapping[str, Any]:
    value = _decode(record.get(key) if key is not None else None, key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"column {key!r} must be an object or its JSON text, is {kind_of(value)}")
    _check_json(value, key)
    return value


def _read_tools(record: Mapping[str, Any], key: str | None) -> tuple[Mapping[str, Any], ...] | None:
    value = _decode(record.get(key) if key is not None else None, key)
    if value is None:
        return None
    must_be = f"column {key!r} must be a list of tool objects or its JSON text"
    if not isinstance(value, list):
        raise ValueError(f"{must_be}, is {kind_of(value)}")
    try:
        tools = tuple(read_tools(value))
    except ValueError as error:
        raise ValueError(f"{must_be}: {error}") from None
    _check_json(tools, key)
    return tools or None


def _read_media(record: Mapping[str, Any], key: str | None) -> tuple[Any, ...]:
    """Return what a column has of pictures or videos."""
    value = record.get(key) if key is not None else None
    if value is None:
        return ()
    given = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(each, str | bytes | Mapping | list) for each in given):
        raise ValueError(
            f"column {key!r} must be a path, URL, data URI or bytes, or a list of these, is {kind_of(value)}"
        )
    return tuple(given)


def _decode(value: Any, key: str | None) -> Any:
    """Return the value of a JSON text; anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return _loaded(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"column {key!r} is a text that is not JSON: {error}") from None


def _loaded(text: str) -> Any:
    value = json.loads(text)
    return well_formed_json(value) if "\\ud" in text.lower() else value


def _check_json(value: Any, key: str | None) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"column {key!r} has a value that JSON cannot hold: {error}") from None

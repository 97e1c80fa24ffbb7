"""The fields of a request that a router reads: its prompt, its conversation, and the ids by which it is aborted.

Axis: P tokens of the prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollfeed.base.sglang_wire import RequestError

_SESSION_HEADERS = ("X-SMG-Routing-Key", "X-Session-Id")
_GROUP_HEADERS = ("X-Group-Id",)
_TEXT_FIELDS = ("text", "messages", "prompt", "input")
_BYTES_PER_ID = 4
"""Of text: about a token, and what an int32 holds."""
_MOST_RID_BYTES = 1 << 20
_MOST_PROMPT_BYTES, _MOST_PROMPTS = 1 << 24, 1 << 12
"""What is more is not looked at as ids, as that takes the loop's time."""
_EMPTY = np.empty(0, np.int32)


class _Fields(msgspec.Struct, gc=False):
    """Fields of all routes for tokens; what a worker needs besides is none of ours."""

    rid: msgspec.Raw = msgspec.Raw()
    request_id: msgspec.Raw = msgspec.Raw()
    stream: bool | None = None
    input_ids: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    session_params: msgspec.Raw = msgspec.Raw()
    routing_key: msgspec.Raw = msgspec.Raw()
    session_id: msgspec.Raw = msgspec.Raw()
    group_id: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    user: msgspec.Raw = msgspec.Raw()


class _SessionParams(msgspec.Struct):
    id: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Fields)
_params_decoder = msgspec.json.Decoder(_SessionParams)
_texts_decoder = msgspec.json.Decoder(list[str])
_ids_decoder = msgspec.json.Decoder(list[int])
_lists_decoder = msgspec.json.Decoder(list[list[int]])


class RequestFields(NamedTuple):
    """A request for tokens, as the choice of its worker sees it."""

    rids: tuple[str, ...] = ()
    stream: bool = False
    prompt_ids: NDArray[np.int32] = _EMPTY
    """``(P,)``; of text, four bytes of UTF-8 stand for an id."""
    session: str | None = None
    group: str | None = None


def read_fields(body: bytes, headers: Mapping[str, str], *, with_prompt: bool) -> RequestFields:
    """Return what a body and its headers say.

    Args:
        body: JSON; fields of other types than they should be are left to the worker, which refuses them.
        headers: By any case of their names.
        with_prompt: Whether the prompt counts for the choice.

    Raises:
        RequestError: If the body is no JSON.
    """
    if not body:
        return RequestFields()
    try:
        fields = _decoder.decode(body)
        return RequestFields(
            rids=_request_ids(fields.rid) or _request_ids(fields.request_id),
            stream=fields.stream is True,
            prompt_ids=_prompt_ids(fields) if with_prompt else _EMPTY,
            session=_header(headers, _SESSION_HEADERS) or _session(fields),
            group=_header(headers, _GROUP_HEADERS) or _key(fields.group_id),
        )
    except msgspec.ValidationError:
        return RequestFields(session=_header(headers, _SESSION_HEADERS))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None


def _header(headers: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((value for name in names if (value := headers.get(name))), None)


def _session(fields: _Fields) -> str | None:
    """Return the first key that there is, of what servers' and routers' users send."""
    if fields.session_params:
        with suppress(msgspec.ValidationError):
            if (key := _key(_params_decoder.decode(fields.session_params).id)) is not None:
                return key
    keys = (fields.routing_key, fields.session_id, fields.prompt_cache_key, fields.user)
    return next((key for value in keys if (key := _key(value)) is not None), None)


def _key(raw: msgspec.Raw) -> str | None:
    """Return a text that is not empty."""
    return msgspec.json.decode(raw) or None if bytes(memoryview(raw)[:1]) == b'"' else None


def _request_ids(raw: msgspec.Raw) -> tuple[str, ...]:
    if len(memoryview(raw)) > _MOST_RID_BYTES:
        raise RequestError(f"rid has more than {_MOST_RID_BYTES} bytes")
    if (key := _key(raw)) is not None:
        return (key,)
    with suppress(msgspec.ValidationError):
        return tuple(_texts_decoder.decode(raw)) if raw else ()
    return ()


def _prompt_ids(fields: _Fields) -> NDArray[np.int32]:
    for raw in (fields.input_ids, fields.token_ids, fields.prompt):
        if raw and (ids := _ids(raw)) is not None:
            return ids
    text: Any = next((raw for name in _TEXT_FIELDS if (raw := getattr(fields, name))), b"")
    # Without what closes it, so that a longer conversation begins with a shorter one.
    whole = min(len(text) - 1, _MOST_PROMPT_BYTES) // _BYTES_PER_ID
    return np.frombuffer(text, np.int32, count=whole) if whole > 0 else _EMPTY


def _ids(raw: msgspec.Raw) -> NDArray[np.int32] | None:
    """Return the ids in a list, of several lists the first one's; None for what is neither."""
    whole = memoryview(raw)
    start = bytes(whole[:16]).split()
    if len(whole) > _MOST_PROMPT_BYTES:
        return None
    try:
        if start and start[0][:1] == b"[" and b"".join(start)[1:2] == b"[":
            if bytes(whole).count(b"[") > _MOST_PROMPTS:
                return None
            # They share most, or go where the first one goes.
            return np.frombuffer(array("i", _lists_decoder.decode(raw)[0]), np.int32)
        return np.frombuffer(array("i", _ids_decoder.decode(raw)), np.int32)
    except (msgspec.DecodeError, OverflowError):
        return None

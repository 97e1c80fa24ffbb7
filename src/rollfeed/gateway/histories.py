"""Histories as harnesses send them, made alike, and digested so that equal ones are found without being compared.

A digest of each beginning of a history that ends with a turn of the assistant: turns of a session are looked up by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from rollfeed.chat_apis.shown_pictures import text_with_hashes
from rollfeed.protocols import Matching
from rollfeed.types import Message
from rollfeed.types.text import text_of

_DIGEST_BYTES = 16
_OPENING, _CLOSING = "<think>", "</think>"
_encoder = msgspec.json.Encoder(order="deterministic")


@dataclass(frozen=True, slots=True)
class Beginning:
    """A beginning of a history that ends with an assistant's turn."""

    num_messages: int
    digest: bytes
    turn: bytes
    """Digest of the turn alone."""


@dataclass(frozen=True, slots=True)
class History:
    """A conversation that a request asks to be gone on with."""

    messages: Sequence[Message]
    beginnings: Sequence[Beginning]
    """The shortest first."""
    digest: bytes
    """Of all messages."""
    hashed: Any
    """The hash of them, to be gone on with."""

    def extended(self, turn: Message, matching: Matching) -> Beginning:
        """Return the beginning of longer histories that this and a turn of the assistant make."""
        alike, hashed = _alike(turn, matching), self.hashed.copy()
        _update(hashed, alike)
        return Beginning(len(self.messages) + 1, hashed.digest(), _alone(alike))


def digest_of(value: Any) -> bytes:
    """Return a digest of JSON values, whatever the order of their keys."""
    return _alone(_encoder.encode(value))


def read_history(messages: Sequence[Message], matching: Matching, *, manner: bytes = b"") -> History:
    """Digest a history. ``manner`` is the digest of what else decides how messages are shown, such as tools."""
    hashed, beginnings = blake2b(manner, digest_size=_DIGEST_BYTES), list[Beginning]()
    for index, message in enumerate(messages):
        alike = _alike(message, matching)
        _update(hashed, alike)
        if message["role"] == "assistant":
            beginnings.append(Beginning(index + 1, hashed.digest(), _alone(alike)))
    return History(messages, beginnings, hashed.digest(), hashed)


def thoughts_fit(sent: Message, said: Message) -> bool:
    """Whether a turn in a history has the thoughts of the one that was said, or none."""
    thought = _thought(sent)
    return not thought or thought == _thought(said)


def _update(hashed: Any, alike: bytes) -> None:
    hashed.update(len(alike).to_bytes(8, "little"))
    hashed.update(alike)


def _alone(alike: bytes) -> bytes:
    return blake2b(alike, digest_size=_DIGEST_BYTES).digest()


def _alike(message: Message, matching: Matching) -> bytes:
    """Return bytes that are the same for messages that count as equal."""
    if matching is Matching.STRICT:
        return _encoder.encode({key: value for key, value in message.items() if value is not None})
    role, content = message["role"], text_of(message.get("content"))
    if role != "assistant":
        return _encoder.encode((role, text_with_hashes(message).strip()))
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    return _encoder.encode((role, _apart(content)[1].strip(), calls))


def _apart(content: str) -> tuple[str, str]:
    """Return the thought that a content begins with, where a harness has put it there, and the rest."""
    begun = content.lstrip()
    if not begun.startswith(_OPENING):
        return "", content
    thought, _, rest = begun.removeprefix(_OPENING).partition(_CLOSING)
    return thought, rest


def _call(call: Mapping[str, Any]) -> tuple[Any, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            arguments = arguments.strip()
    return function.get("name"), _plain(arguments or {})


def _plain(value: Any) -> Any:
    """Return a JSON value whose whole numbers have no point: harnesses in JavaScript know no other."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _thought(message: Message) -> str:
    told = message.get("reasoning_content") or _apart(text_of(message.get("content")))[0]
    return str(told).strip()

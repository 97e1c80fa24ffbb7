"""A form in which assistants' turns are asked for and told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from rollfeed.chat_apis.api_error import ApiError
from rollfeed.chat_apis.asked import Asked
from rollfeed.chat_apis.said import Said, TokenLogprob

COMMENT = b": \n\n"
"""An event of a stream that clients overlook."""
_PIECE = 1 << 10
"""Characters of a text or of arguments that are told at once."""
_encoder = msgspec.json.Encoder()


class ReplyEvents(Protocol):
    """The server-sent events of one reply, in the order opening, progress and finished, ending.

    Each method returns the bytes to send next, which may be none. Progress need not be told: what was not is told when
    a choice has finished.
    """

    def opening(self, *, prompt_tokens: int = 0) -> bytes:
        """Return what is sent first; the tokens of the prompt are told where they are known."""

    def ping(self) -> bytes:
        """Return what keeps a connection open while nothing is told, after the opening."""

    def progress(self, choice: int, reasoning: str, content: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """Return what is new of a choice.

        Thought and content are all of it so far, ``logprobs`` of tokens that have not been told of yet.
        """

    def finished(self, choice: int, said: Said) -> bytes:
        """Return what is left to tell of a choice."""

    def ending(self, said: Sequence[Said]) -> bytes:
        """Return what is sent last; all choices have been finished."""

    def failure(self, error: ApiError) -> bytes:
        """Return what is sent last in place of the rest."""


class ChatApi(Protocol):
    """Reads requests of an API, and gives replies and errors its form. It has no state."""

    @property
    def path(self) -> str:
        """The path of its endpoint, such as ``/v1/messages``."""

    def read(self, body: Any) -> Asked:
        """Return the request that a decoded body is. Raises ApiError if it is none, or cannot be served."""

    def new_id(self) -> str:
        """Return a new id for a reply."""

    def reply(self, asked: Asked, said: Sequence[Said], *, reply_id: str, created: int) -> dict[str, Any]:
        """Return the body of a reply, a turn for each choice; ``created`` is in seconds since 1970."""

    def events(self, asked: Asked, *, reply_id: str, created: int) -> ReplyEvents:
        """Return what makes the events of a streamed reply."""

    def error(self, error: ApiError) -> tuple[int, dict[str, Any]]:
        """Return HTTP status and body of an error."""


def event(content: Mapping[str, Any], *, name: str | None = None) -> bytes:
    """Return a server-sent event of a JSON value."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _encoder.encode(content) + b"\n\n"


def pieces(text: str, begin: int = 0) -> Iterator[str]:
    """Return a text from some character on, in pieces."""
    return (text[start : start + _PIECE] for start in range(begin, len(text), _PIECE))


def stream_of(events: ReplyEvents, said: Sequence[Said]) -> Iterator[bytes]:
    """Return what follows the opening of a stream whose turns have all finished."""
    for choice, turn in enumerate(said):
        yield events.finished(choice, turn)
    yield events.ending(said)

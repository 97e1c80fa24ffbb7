"""A reply while it is received: from bytes in pieces of any size to status, headers and content."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import httptools

from rollfeed.engine.http.body_room import Body

_LONGEST_HEAD_BYTES = 1 << 16
_MOST_PROVISIONAL = 16
"""Replies with a 1xx status before the real one."""
_SMALL_BYTES = 1 << 16
"""Of a body that is let in without being counted."""
_LAST_EVENT = b"[DONE]"


class BrokenConnectionError(ConnectionError):
    """The connection ended, or made no sense, before the reply was whole."""


class HttpReply(NamedTuple):
    """A whole reply."""

    status: int
    headers: dict[str, str]
    """By lower-case name."""
    content: bytes | bytearray | None
    """None where it came as events."""


class Incoming:
    """A reply that is being received: what the parser tells of it. Until then it is waited for, and small."""

    def __init__(
        self,
        *,
        most_bytes: int,
        events: Callable[[bytes], None] | None,
        pieces: Callable[[bytes], None] | None = None,
    ) -> None:
        self.is_whole = False
        self.keeps_open = False
        self.error: Exception | None = None
        """Raised by whoever takes the events."""
        self.size = 0
        """Of a large body, which is received without the parser behind its first piece."""
        self.body: Body | None = None
        """Where it goes, once there is room."""
        self.has_ended = False
        """Whether the last event of a stream has come."""
        self.content: bytes | bytearray = b""
        self._most_bytes = most_bytes
        self._events = events
        self._splitter: _EventSplitter | None = None
        """Of a reply that comes as events."""
        self._pieces = pieces
        self._is_stream = False
        self._status = 0
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._num_provisional = 0
        self._num_bytes = 0
        self._parser: httptools.HttpResponseParser | None = None
        """From the first bytes on: it refers to this in eight ways."""

    def feed(self, piece: memoryview) -> None:
        """Take what has come. Raises BrokenConnectionError if it is no HTTP, or too much."""
        if not self._status:
            self._head_bytes += len(piece)
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        try:
            self._parser.feed_data(piece)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self.error is not None:
                raise self.error from None
            raise BrokenConnectionError(f"not HTTP: {error.__context__ or error}") from error
        if not self._status and self._head_bytes > _LONGEST_HEAD_BYTES:
            raise BrokenConnectionError("not HTTP: the head is too long")

    def start(self, body: Body) -> None:
        """Have the rest of a large body go there."""
        self.body, self._num_bytes = body, len(self.content)
        body[: self._num_bytes] = self.content

    def rest(self) -> memoryview:
        """Return where the next bytes of a large body go."""
        assert self.body is not None
        return memoryview(self.body)[self._num_bytes :]

    def fill(self, num_bytes: int) -> None:
        """Count bytes that have gone there."""
        assert self.body is not None
        self._num_bytes += num_bytes
        if self._num_bytes == self.size:
            self.content, self.is_whole = self.body, True
        elif self._num_bytes == len(self.body):
            self.body = self.body.grown(self.size)

    def close(self) -> None:
        """Let go of what has come, at once: the parser and this refer to each other."""
        self.content, self.body, self._parser = b"", None, None

    def end_with_connection(self) -> bool:
        """Whether the end of the connection is that of the reply, which has told no other."""
        has_length = "content-length" in self._headers or "transfer-encoding" in self._headers
        self.is_whole = self.is_whole or (self._status > 0 and not has_length)
        return self.is_whole

    def reply(self) -> HttpReply:
        """Return what has come, which is whole.

        Raises:
            BrokenConnectionError: If a stream ended before its last event.
        """
        if not self._is_stream:
            return HttpReply(self._status, self._headers, self.content)
        if self._events is not None and not self.has_ended:
            raise BrokenConnectionError("the stream ended before its last event")
        return HttpReply(self._status, self._headers, None)

    def on_message_begin(self) -> None:
        if self.is_whole:
            raise ValueError("more than one reply")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:
            return
        self._status, self._head_bytes = status, 0
        self.keeps_open = self._parser.should_keep_alive()
        size = int(self._headers.get("content-length", 0))
        if size > self._most_bytes:
            raise ValueError(f"a body of {size} bytes, where {self._most_bytes} are the most")
        is_taken = self._events is not None or self._pieces is not None
        if is_taken and status == 200 and "event-stream" in self._headers.get("content-type", ""):
            self._is_stream = True
            self._splitter = _EventSplitter(self._events) if self._events is not None else None
        elif size > _SMALL_BYTES:
            self.size = size
        elif not size:
            self.content = bytearray()

    def on_body(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > self._most_bytes:
            raise ValueError(f"a body of more than {self._most_bytes} bytes, which are the most")
        if not self._is_stream:
            self.content += piece
            return
        try:
            if self._splitter is not None:
                self.has_ended = self._splitter.feed(piece) or self.has_ended
            elif self._pieces is not None:
                self._pieces(piece)
        except Exception as error:
            self.error = error
            raise

    def on_message_complete(self) -> None:
        if self._status:
            self.is_whole = True
            return
        self._headers.clear()  # provisional: the real one follows
        self._num_provisional += 1
        if self._num_provisional > _MOST_PROVISIONAL:
            raise ValueError("only provisional replies")


class _EventSplitter:
    """Finds the ``data:`` of events in pieces of any size."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._rest = bytearray()
        self._searched = 0

    def feed(self, piece: bytes) -> bool:
        """Hand on what each line that is now complete carries; return whether the last one has come."""
        self._rest += piece
        start, has_ended = 0, False
        while not has_ended and (end := self._rest.find(b"\n", max(start, self._searched))) >= 0:
            line = bytes(self._rest[start:end]).rstrip(b"\r")
            start = self._searched = end + 1
            if line.startswith(b"data:"):
                content = line[5:].strip()
                has_ended = content == _LAST_EVENT
                if not has_ended:
                    self._take(content)
        del self._rest[:start]
        self._searched = len(self._rest)
        return has_ended

"""Frames between the pool and one worker, on the event loop."""

from __future__ import annotations

import asyncio
import struct

from rollfeed.workers.child import MAX_FRAME_BYTES

_HEAD_BYTES = 4
_MAX_HEADER_BYTES = 4_096


class Channel(asyncio.Protocol):
    """One end of a worker's socket: one request, then one reply, in turns."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._received = bytearray()
        self._reply: asyncio.Future[bytes | None] | None = None
        self._closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < _HEAD_BYTES:
            return
        (length,) = struct.unpack_from("!I", self._received)
        if length > MAX_FRAME_BYTES + _MAX_HEADER_BYTES:
            self.close()
        elif len(self._received) >= _HEAD_BYTES + length:
            frame = bytes(self._received[_HEAD_BYTES : _HEAD_BYTES + length])
            # A worker speaks when it is spoken to: what follows a reply is no reply.
            self._received.clear()
            self._deliver(frame)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._closed = True
        self._deliver(None)

    async def ask(self, frame: bytes) -> bytes | None:
        """Send a request and return the reply, or None when the worker has gone."""
        if self._closed or self._transport is None:
            return None
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(struct.pack("!I", len(frame)) + frame)
        try:
            return await self._reply
        finally:
            self._reply = None

    def close(self) -> None:
        """Close the socket at once; an idle worker ends at that."""
        if self._transport is not None:
            self._transport.abort()

    def _deliver(self, frame: bytes | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(frame)

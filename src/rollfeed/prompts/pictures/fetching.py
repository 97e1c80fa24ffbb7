"""Fetches a picture from a URL of a data set, a message or a tool, none of which is trusted.

Invariant: no connection is made to an address that is not public. The host is resolved here, every address that it has
is looked at, and the connection goes to the address that was looked at; so again after each redirect.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias
from urllib.parse import urljoin, urlsplit

Resolve: TypeAlias = Callable[[str, int], list[str]]
"""The addresses of a host, as numbers."""

_MOST_REDIRECTS = 5
_PIECE_BYTES = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)


def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host. Raises OSError if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_public(address: str) -> bool:
    """Whether an address is one that everybody may reach: not private, loopback, link-local or reserved."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        embedded = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo[1] if parsed.teredo else None)
        if embedded is not None:
            parsed = embedded
        elif parsed in ipaddress.ip_network("64:ff9b::/96"):  # IPv4 behind a translator
            parsed = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
    return parsed.is_global and not parsed.is_multicast


class Fetcher:
    """Fetches bytes by HTTP, within bounds.

    ``max_bytes`` are of an answer, ``timeout_seconds`` for a URL, redirects included.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        timeout_seconds: float,
        resolve: Resolve = resolve_host,
        may_reach: Callable[[str], bool] = is_public,
    ) -> None:
        self._max_bytes, self._timeout_seconds = max_bytes, timeout_seconds
        self._resolve, self._may_reach = resolve, may_reach

    def fetch(self, url: str) -> bytes:
        """Return what a URL answers.

        Raises:
            ValueError: If it cannot be fetched, is too large or takes too long, or leads to an address that is not
                public; says why.
        """
        ends_at = time.monotonic() + self._timeout_seconds
        place = url
        for _ in range(_MOST_REDIRECTS + 1):
            try:
                answer = self._ask(place, ends_at)
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                if isinstance(error, TimeoutError) or time.monotonic() >= ends_at:
                    raise ValueError(f"it was not there in {self._timeout_seconds:g} s") from None
                raise ValueError(f"it cannot be fetched: {type(error).__name__}: {error}") from None
            if isinstance(answer, bytes):
                return answer
            place = urljoin(place, answer)
        raise ValueError(f"it leads on and on, over {_MOST_REDIRECTS} redirects")

    def _ask(self, url: str, ends_at: float) -> bytes | str:
        """Return the body, or where it is to be found instead."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"it leads to {url!r:.100}, which is neither http:// nor https://")
        is_safe = parts.scheme == "https"
        port = parts.port or (443 if is_safe else 80)
        address = self._address(parts.hostname, port)
        connection = (http.client.HTTPSConnection if is_safe else http.client.HTTPConnection)(parts.hostname, port)
        try:
            connection.sock = socket.create_connection((address, port), timeout=_left(ends_at))
            with _cut_off(connection.sock, ends_at):
                if is_safe:
                    context = ssl.create_default_context()
                    connection.sock = context.wrap_socket(connection.sock, server_hostname=parts.hostname)
                target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                connection.request("GET", target, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
                reply = connection.getresponse()
                if reply.status in _REDIRECTS and (place := reply.getheader("Location")):
                    return place
                if reply.status != 200:
                    raise ValueError(f"it answers HTTP {reply.status}")
                return self._body(reply, ends_at)
        finally:
            connection.close()

    def _address(self, host: str, port: int) -> str:
        addresses = self._resolve(host, port)
        if not addresses:
            raise ValueError(f"{host} has no address")
        for address in addresses:
            if not self._may_reach(address):
                raise ValueError(f"it leads to {host}, {address}, which is no public address: give the file's path")
        return addresses[0]

    def _body(self, reply: http.client.HTTPResponse, ends_at: float) -> bytes:
        pieces, size = list[bytes](), 0
        while piece := reply.read1(_PIECE_BYTES):
            pieces.append(piece)
            size += len(piece)
            if size > self._max_bytes:
                limit = self._max_bytes / (1 << 20)
                raise ValueError(f"it has more bytes than prompts.pictures.max_megabytes = {limit:g}")
        _left(ends_at)  # what has been cut off may look whole
        if reply.length:
            raise ValueError(f"it ended {reply.length} bytes early")
        return b"".join(pieces)


@contextmanager
def _cut_off(connected: socket.socket, ends_at: float) -> Iterator[None]:
    """End a connection when its time is over: one that sends a byte now and then never lets a read time out."""
    same = connected.dup()
    timer = threading.Timer(max(0.0, ends_at - time.monotonic()) + 0.01, _shut, [same])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        same.close()


def _shut(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _left(ends_at: float) -> float:
    seconds = ends_at - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds

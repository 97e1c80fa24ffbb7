"""Weights as what has changed in them, sent to a receiver on each server's host while the server serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from rollfeed.errors import ConfigError, EngineProtocolError
from rollfeed.protocols import Command, MetServer, TransportContext
from rollfeed.types import FolderUpdate, TensorUpdate
from rollfeed.weights.home import KEPT_FOLDERS
from rollfeed.weights.transports.delta.encoding import UNREADABLE, DamagedError
from rollfeed.weights.transports.delta.files import CheckpointPieces, Sums, digest_of, write_delta
from rollfeed.weights.transports.delta.receiver import HELD_PATH, PREPARE_PATH
from rollfeed.weights.transports.delta.store import HeldVersion
from rollfeed.weights.transports.disk import DiskTransport

logger = logging.getLogger(__name__)

_MOST_OF_WHOLE = 0.6
"""A delta that is a larger share of the weights' bytes saves little: a whole file is about 0.7 of them."""
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
"""Seconds; a receiver answers when it has rebuilt the folder."""


class PublishedVersion:
    """A version as this process has published it, and the files that tell of it.

    Raises:
        OSError: If the delta from the version before cannot be written.
    """

    def __init__(self, folder: Path, *, policy_version: int, before: PublishedVersion | None) -> None:
        self.policy_version = policy_version
        self.base: str | None = None
        self.delta = folder.with_suffix(".delta")
        """There is one if there is a base."""
        self._whole = folder.with_suffix(".whole")
        self._pieces = CheckpointPieces(folder)
        self._writing = asyncio.Lock()
        if before is None:
            self._sums = self._pieces.sums()
        else:
            self._sums = self._write(self.delta, before._pieces, before._sums)
            if self.delta.stat().st_size <= _MOST_OF_WHOLE * sum(self._pieces.sizes.values()):
                self.base = before.digest
        self.digest: str = digest_of(self._sums)

    async def whole(self) -> Path:
        """Return a file that needs no other version, made when it is asked for."""
        async with self._writing:
            if not self._whole.exists():
                await asyncio.to_thread(self._write, self._whole)
        return self._whole

    def remove(self) -> None:
        """Remove the files, but for the folder."""
        self._whole.unlink(missing_ok=True)
        self.delta.unlink(missing_ok=True)

    def _write(self, path: Path, old: CheckpointPieces | None = None, old_sums: Sums | None = None) -> Sums:
        version = self.policy_version
        return write_delta(path, self._pieces, policy_version=version, old=old, old_sums=old_sums or {})


class DeltaTransport:
    """Fits :class:`rollfeed.protocols.WeightTransport`: sends what has changed since the version before.

    Each version is written as :class:`DiskTransport` does, and compared with the one before. A receiver that does not
    have that one, or where the change is as large, gets all.

    Raises:
        ConfigError: If there is no receiver, and the servers are of a kind that never is one.
    """

    def __init__(self, context: TransportContext) -> None:
        if context.kind != "sglang" and not context.receivers:
            raise ConfigError(
                f"engine.{context.kind}.weights_receivers is empty: with weights_transport = 'delta' name the address "
                "of `rollfeed serve weights` on each host of servers"
            )
        self._disk = DiskTransport.made_for(context)
        self._receivers = context.receivers
        self._headers = {} if context.key is None else {"Authorization": f"Bearer {context.key}"}
        self._is_shared = context.folder is not None
        self._published: list[PublishedVersion] = []
        """As many as there are folders."""
        self._sending: dict[str, asyncio.Lock] = {}
        """By receiver: what several servers take from one is sent once."""

    def meet(self, servers: Sequence[MetServer]) -> None:
        """Learn of the servers.

        Raises:
            EngineProtocolError: If one has no receiver.
        """
        for server in servers:
            self.receiver_of(server.address)

    def receiver_of(self, server: str) -> str:
        """Return the address of the receiver that a server takes from: its host's, the only one, or the server itself.

        Raises:
            EngineProtocolError: If there are several, and none of them or more than one is on that host.
        """
        if len(self._receivers) < 2:
            return self._receivers[0] if self._receivers else server
        host = urlsplit(server).hostname
        found = [each for each in self._receivers if urlsplit(each).hostname == host]
        if len(found) != 1:
            raise EngineProtocolError(
                f"{server}: {len(found)} of weights_receivers are on its host: name one receiver for each host, with "
                "the host as the server's address has it"
            )
        return found[0]

    async def stage(self, update: TensorUpdate) -> DeltaUpdate:
        version, before = update.policy_version, self._published[-1] if self._published else None
        folder = await asyncio.to_thread(self._disk.write, update.tensors, policy_version=version)
        try:
            staged = await asyncio.to_thread(lambda: PublishedVersion(folder, policy_version=version, before=before))
        except (OSError, DamagedError) as error:
            raise EngineProtocolError(f"the delta to version {version} cannot be written: {error}") from error
        self._published.append(staged)
        if len(self._published) > KEPT_FOLDERS:
            self._published.pop(0).remove()
        return DeltaUpdate(folder, policy_version=version, published=staged, transport=self, folders={})

    def close(self) -> None:
        for each in self._published:
            each.remove()
        self._disk.close()

    async def send(self, published: PublishedVersion, receiver: str) -> tuple[Path, int]:
        """Have a receiver hold a version; return its folder there and the bytes that were sent.

        Raises:
            EngineProtocolError: If it refuses or does not answer; its server serves what it served.
        """
        try:
            async with (
                self._sending.setdefault(receiver, asyncio.Lock()),
                aiohttp.ClientSession(receiver, headers=self._headers, timeout=_TIMEOUT) as session,
            ):
                return await self._send(session, published, receiver)
        except (aiohttp.ClientError, TimeoutError, OSError, *UNREADABLE, KeyError) as error:
            raise EngineProtocolError(
                f"{receiver}: the receiver of weights does not take version {published.policy_version}: "
                f"{type(error).__name__}: {error}; is `rollfeed serve weights` running there?"
            ) from error

    async def _send(
        self, session: aiohttp.ClientSession, published: PublishedVersion, receiver: str
    ) -> tuple[Path, int]:
        async with session.get(HELD_PATH) as reply:
            content = await _content(reply, receiver, published)
        held = msgspec.convert(content["versions"], list[HeldVersion])
        for each in held:
            if (each.policy_version, each.digest) == (published.policy_version, published.digest):
                return Path(each.folder), 0
        deltas = [published.delta] if published.base in {each.digest for each in held} else []
        num_bytes = 0
        for path in [*deltas, None]:
            path = path or await published.whole()
            num_bytes += path.stat().st_size
            reply = await self._post(session, path)
            content = await _content(reply, receiver, published)
            if reply.status == 200:
                return Path(msgspec.convert(content, HeldVersion).folder), num_bytes
            if reply.status not in (400, 409):
                break
            logger.warning("%s: %s", receiver, content.get("message"))
        raise EngineProtocolError(
            f"{receiver}: takes no weights of version {published.policy_version}: {content.get('message')}"
        )

    async def _post(self, session: aiohttp.ClientSession, path: Path) -> aiohttp.ClientResponse:
        """Send a file by its path where that may be known there, else its bytes; the reply has been read."""
        reply = None
        if self._is_shared:
            reply = await session.post(PREPARE_PATH, json={"path": str(path)})
            await reply.read()
        if reply is None or reply.status == 404:
            with path.open("rb") as file:
                reply = await session.post(PREPARE_PATH, data=file)
                await reply.read()
        return reply


@dataclass(frozen=True, kw_only=True)
class DeltaUpdate(FolderUpdate):
    """A version that each server's receiver makes a folder of; the server then loads it as any other one."""

    published: PublishedVersion
    transport: DeltaTransport
    folders: dict[str, Path]
    """Where the folder is, by the address of a server that has prepared."""

    async def prepare(self, address: str, command: Command) -> int:
        del command
        receiver = self.transport.receiver_of(address)
        self.folders[address], num_bytes = await self.transport.send(self.published, receiver)
        return num_bytes

    def folder_at(self, address: str) -> Path:
        return self.folders[address]


async def _content(reply: aiohttp.ClientResponse, receiver: str, published: PublishedVersion) -> Mapping[str, Any]:
    """Return the object in a reply. Raises EngineProtocolError if it is none of a receiver."""
    if reply.status in (401, 403):
        problem = "the receiver of weights refuses the key: give it the one in engine.*.api_key_env"
    elif reply.status in (404, 405) or reply.content_type != "application/json":
        problem = (
            f"HTTP {reply.status} where a receiver of weights should be: start `rollfeed serve weights` on the host of "
            "each server, and name them in weights_receivers"
        )
    else:
        return msgspec.json.decode(await reply.read(), type=dict[str, Any])
    raise EngineProtocolError(f"{receiver}: takes no weights of version {published.policy_version}: {problem}")

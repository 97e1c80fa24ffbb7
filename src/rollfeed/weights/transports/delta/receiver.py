"""A receiver of deltas over HTTP, beside a server that loads folders or inside one."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rollfeed.base.serving import decoded_body
from rollfeed.weights.transports.delta.encoding import DamagedError
from rollfeed.weights.transports.delta.store import CheckpointStore, HeldVersion, OtherBaseError

PREPARE_PATH = "/prepare_weights_from_delta"
HELD_PATH = "/prepared_weights"
_CHUNK_BYTES = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DeltaReceiver:
    """Makes checkpoint folders from deltas, one after the other, and says where they are.

    ``store`` is where the folders are.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[HeldVersion]] = set()

    def routes(self) -> list[web.RouteDef]:
        return [web.get(HELD_PATH, self.tell), web.post(PREPARE_PATH, self.prepare)]

    async def tell(self, _request: web.Request) -> web.Response:
        """Return the versions that are here, the newest last."""
        return _reply({"versions": [msgspec.to_builtins(held) for held in self._store.held]})

    async def prepare(self, request: web.Request) -> web.Response:
        """Take a delta, as the bytes of the body or as JSON with its path, and return the folder it makes."""
        try:
            delta, incoming = await self._delta(request)
            # To its end, also when whoever has sent it goes away: nothing else may begin meanwhile.
            receiving = asyncio.ensure_future(self._receive(delta, incoming))
            self._tasks.add(receiving)
            receiving.add_done_callback(self._forget)
            held = await asyncio.shield(receiving)
        except OtherBaseError as error:
            return _refusal(409, str(error))
        except DamagedError as error:
            return _refusal(400, f"the delta is damaged, and nothing of it is kept: {error}")
        except FileNotFoundError as error:
            return _refusal(404, str(error))
        except OSError as error:
            if error.errno not in _NO_ROOM:
                return _refusal(400, f"the delta cannot be read: {error.strerror or error}")
            problem = f"{error.strerror or error}, so the delta is not kept; the older versions are as they were"
            return _refusal(507, problem)
        return _reply({"success": True, **msgspec.to_builtins(held)})

    async def _receive(self, delta: Path, incoming: Path | None) -> HeldVersion:
        def receive() -> HeldVersion:
            try:
                return self._store.receive(delta)
            finally:
                if incoming is not None:
                    incoming.unlink(missing_ok=True)

        async with self._one_at_a_time:
            return await asyncio.to_thread(receive)

    def _forget(self, task: asyncio.Task[HeldVersion]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its publisher is told; without one, nobody need be

    async def _delta(self, request: web.Request) -> tuple[Path, Path | None]:
        """Return where the delta is, and what is to be removed in the end."""
        if request.content_type == "application/json":
            try:
                body = await decoded_body(await request.read(), large_bytes=_CHUNK_BYTES)
            except ValueError as error:
                raise DamagedError(str(error)) from None
            path = body.get("path") if isinstance(body, dict) else None
            if not isinstance(path, str) or not path or "\0" in path:
                raise DamagedError("the body has no path of a delta")
            return Path(path), None
        incoming = self._store.incoming()
        try:
            with incoming.open("wb") as file:
                async for chunk in request.content.iter_chunked(_CHUNK_BYTES):
                    await asyncio.to_thread(file.write, chunk)
        except BaseException:
            incoming.unlink(missing_ok=True)
            raise
        return incoming, incoming


def _refusal(status: int, message: str) -> web.Response:
    return _reply({"success": False, "message": message}, status=status)


def _reply(content: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")

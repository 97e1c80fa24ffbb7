"""Pausing a server and giving it new weights, where it offers that.

vLLM does with ``VLLM_SERVER_DEV_MODE=1``: ``/pause``, ``/resume``, ``/reset_prefix_cache``, and
``/collective_rpc``, by which every worker of it is told to reload its weights from a folder.

Invariant: no request is sent between the moment an update begins and the moment the server has
confirmed it; after one whose end is not known, none is sent until another one has succeeded.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollfeed.engine.http import error_message
from rollfeed.engine.openai.counters import Counters
from rollfeed.engine.openai.sending import Sender
from rollfeed.engine.openai.transport import Transport
from rollfeed.errors import EngineError, EngineProtocolError, EngineUnavailableError

_ABSENT = (404, 405, 501)
_HOW = "start vLLM with VLLM_SERVER_DEV_MODE=1, which offers them on a network that you trust"


class WeightUpdater:
    """Keeps the server at one version."""

    def __init__(
        self,
        *,
        transport: Transport,
        sender: Sender,
        counters: Counters,
        control_timeout_seconds: float,
        update_timeout_seconds: float,
    ) -> None:
        self._transport = transport
        self._sender = sender
        self._counters = counters
        self._control_timeout_seconds = control_timeout_seconds
        self._update_timeout_seconds = update_timeout_seconds
        self._is_paused = False
        self._is_paused_there = False
        self._lock = asyncio.Lock()

    async def pause(self) -> None:
        """Hold every request: at the server if it can, else by ending it here, to go on from its tokens later.

        Raises:
            EngineError: If the server can pause and does not.
        """
        async with self._lock:
            self._sender.close_gate()
            self._is_paused = True
            self._is_paused_there = await self._offers("/pause?mode=keep")
            if not self._is_paused_there:
                await self._sender.empty(timeout_seconds=self._control_timeout_seconds)

    async def resume(self) -> None:
        """Let every request go on.

        Raises:
            EngineError: If the server does not confirm.
        """
        async with self._lock:
            if self._is_paused_there:
                await self._command("/resume")
                self._is_paused_there = False
            self._is_paused = False
            self._sender.open_gate()

    async def update(self, folder: Path, *, policy_version: int) -> None:
        """Have the server load the weights of a folder; what runs goes on from its tokens, with the new ones.

        Raises:
            EngineProtocolError: If it does not offer that, or refuses; it serves the old weights.
            EngineUnavailableError: If the end is not known; nothing is sent until another update succeeds.
        """
        async with self._lock:
            self._sender.close_gate()
            try:
                await self._sender.empty(timeout_seconds=self._control_timeout_seconds)
                if not await self._offers("/pause?mode=abort"):
                    raise EngineProtocolError(f"{self._transport.base_url}: has no routes to change weights by: {_HOW}")
                try:
                    await self._load(folder)
                    self._sender.policy_version = policy_version
                finally:
                    if not self._is_paused_there:
                        await self._command("/resume")
            finally:
                if not self._is_paused:
                    self._sender.open_gate()
            self._counters.weight_updates += 1

    async def _load(self, folder: Path) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        has_loaded = False
        try:
            await self._command("/collective_rpc", reload, timeout_seconds=self._update_timeout_seconds)
            has_loaded = True
            # Without the parameter a server answers 200 and keeps its cache while anybody's request uses it.
            await self._command("/reset_prefix_cache?reset_running_requests=true")
        except (EngineError, asyncio.CancelledError) as error:
            if has_loaded or not isinstance(error, EngineProtocolError):
                self._sender.broken = (
                    f"{self._transport.base_url}: its weights are not known since an update failed: {error}"
                )
            raise
        self._sender.broken = None

    async def _offers(self, path: str) -> bool:
        reply = await self._transport.control("POST", path)
        if reply.status in _ABSENT:
            return False
        if reply.status != 200:
            raise EngineUnavailableError(
                f"{self._transport.base_url}{path}: HTTP {reply.status}: {error_message(reply.content)}"
            )
        return True

    async def _command(self, path: str, body: object = None, *, timeout_seconds: float | None = None) -> None:
        reply = await self._transport.control("POST", path, body, timeout_seconds=timeout_seconds)
        message = f"{self._transport.base_url}{path}: HTTP {reply.status}: {error_message(reply.content)}"
        if reply.status >= 500:
            raise EngineUnavailableError(message)
        if reply.status != 200:
            raise EngineProtocolError(message)

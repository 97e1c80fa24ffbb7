"""Pausing a server and giving it new weights, where it offers that.

vLLM does with ``VLLM_SERVER_DEV_MODE=1``: ``/pause``, ``/resume``, ``/reset_prefix_cache``, and
``/collective_rpc``, by which every worker of it is told to reload its weights from a folder. Newer ones (0.32)
keep a name for their version: ``/update_weight_version`` sets it, ``/weight_info`` tells it, and the replies of the
route for tokens say which token saw which. By it a server is known that was started again, with its first weights.

Invariant: no request is sent between the moment an update begins and the moment the server has
confirmed it; after one whose end is not known, none is sent until another one has succeeded.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from rollfeed.engine.http import Failure, TryFailedError, error_message
from rollfeed.engine.openai.counters import Counters
from rollfeed.engine.openai.sending import Sender
from rollfeed.engine.openai.transport import Transport
from rollfeed.engine.weight_versions import version_number
from rollfeed.errors import EngineError, EngineProtocolError, EngineUnavailableError

_log = logging.getLogger(__name__)

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
        self.is_paused = False
        """By the caller; an update leaves the server so."""
        self._is_paused_there = False
        self._names_versions = False
        self._folder: Path | None = None
        self._lock = asyncio.Lock()

    async def meet(self) -> None:
        """Find out whether the server names its version, and begin with that one.

        Raises:
            EngineError: If it does not answer, or names one that is no policy version.
        """
        told = await self._told_version()
        if told is not None:
            self._names_versions = True
            self._sender.policy_version = told
            self._sender.restore = self.restore

    async def restore(self) -> None:
        """Ask a suspect server for its version, and have it load the published weights where it has lost them.

        Raises:
            TryFailedError: If it does not answer.
            EngineError: If it does not load them.
        """
        async with self._lock:
            if not self._sender.is_suspect:
                return
            try:
                told = await self._told_version()
            except EngineUnavailableError as error:
                raise TryFailedError(Failure.CONNECTION, str(error)) from error
            current = self._sender.policy_version
            if told is not None and told < current:
                message = f"{self._transport.base_url}: serves version {told}, {current} is current"
                if self._folder is None:
                    self._sender.broken = f"{message}, and no weights have been published from here"
                else:
                    _log.warning("%s: it is given them again", message)
                    await self._change(self._folder, current)
            self._sender.is_suspect = False

    async def pause(self) -> None:
        """Hold every request: at the server if it can, else by ending it here, to go on from its tokens later.

        Raises:
            EngineError: If the server can pause and does not.
        """
        async with self._lock:
            self._sender.close_gate()
            self.is_paused = True
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
            self.is_paused = False
            self._sender.open_gate()

    async def update(self, folder: Path, *, policy_version: int) -> None:
        """Have the server load the weights of a folder; what runs goes on from its tokens, with the new ones.

        Raises:
            EngineProtocolError: If it does not offer that, or refuses; it serves the old weights.
            EngineUnavailableError: If the end is not known; nothing is sent until another update succeeds.
        """
        async with self._lock:
            await self._change(folder, policy_version)
            self._counters.weight_updates += 1

    async def _change(self, folder: Path, policy_version: int) -> None:
        self._sender.close_gate()
        try:
            await self._sender.empty(timeout_seconds=self._control_timeout_seconds)
            if not await self._offers("/pause?mode=abort"):
                raise EngineProtocolError(f"{self._transport.base_url}: has no routes to change weights by: {_HOW}")
            try:
                await self._load(folder, policy_version)
                self._sender.policy_version, self._folder = policy_version, folder
            finally:
                if not self._is_paused_there:
                    await self._command("/resume")
        finally:
            if not self.is_paused:
                self._sender.open_gate()

    async def _load(self, folder: Path, policy_version: int) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        has_loaded = False
        try:
            await self._command("/collective_rpc", reload, timeout_seconds=self._update_timeout_seconds)
            has_loaded = True
            if self._names_versions:
                await self._command("/update_weight_version", {"new_version": str(policy_version)})
            # Without the parameter a server answers 200 and keeps its cache while anybody's request uses it.
            await self._command("/reset_prefix_cache?reset_running_requests=true")
        except (EngineError, asyncio.CancelledError) as error:
            if has_loaded or not isinstance(error, EngineProtocolError):
                self._sender.broken = (
                    f"{self._transport.base_url}: its weights are not known since an update failed: {error}"
                )
            raise
        self._sender.broken = None

    async def _told_version(self) -> int | None:
        """Return the version that the server names; None where it names none."""
        url = f"{self._transport.base_url}/weight_info"
        reply = await self._transport.control("GET", "/weight_info")
        if reply.status >= 500 and reply.status not in _ABSENT:
            raise EngineUnavailableError(f"{url}: HTTP {reply.status}: {error_message(reply.content)}")
        told = reply.json().get("weight_version") if reply.status == 200 else None
        if not isinstance(told, str):
            return None
        try:
            return version_number(told)
        except EngineProtocolError as error:
            raise EngineProtocolError(f"{url}: {error}") from None

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

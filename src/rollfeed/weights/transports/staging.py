"""Servers that a transport has met, and tensors as these hold them: common to transports without files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import torch

from rollfeed.base.tensor_buckets import TensorBucket, make_buckets
from rollfeed.errors import CheckpointError, EngineError, EngineProtocolError, EngineUnavailableError
from rollfeed.model_files import has_weights, read_headers
from rollfeed.protocols import Command, MetServer, TransportContext
from rollfeed.types import TensorUpdate
from rollfeed.weights.serving import ServingForm, served_tensors

_INLINE_BYTES = 1 << 26
"""Of a bucket whose bytes a server parses as JSON, which it does in the thread that answers everybody."""
_GPU_BYTES = 1 << 30
_LAST_SECONDS = 10.0
NOT_FOUND = 404


class Staging:
    """Knows the servers, and makes buckets of tensors by their checkpoint.

    Raises:
        CheckpointError: If the checkpoint is unreadable.
    """

    def __init__(self, context: TransportContext) -> None:
        self._untied_head = context.untied_head
        self._servers: dict[str, MetServer] = {}
        self._form = ServingForm(context.checkpoint, untied_head=self._untied_head)

    def meet(self, servers: Sequence[MetServer]) -> None:
        """Compare the checkpoints of servers on this host with that of the run, or begin to go by them.

        Raises:
            EngineProtocolError: If a server has another model, whose process an update could end.
        """
        for server in servers:
            self._servers[server.address] = server
            folder = Path(server.model_path or "")
            try:
                if server.model_path is None or not folder.is_dir() or not has_weights(folder):
                    continue
                stored = read_headers(folder)
                if not self._form.stored:
                    self._form = ServingForm(folder, untied_head=self._untied_head)
            except CheckpointError as error:
                raise EngineProtocolError(f"{server.address}: {error}") from error
            shapes = {name: header.shape for name, header in stored.items()}
            known = {name: header.shape for name, header in self._form.stored.items()}
            if other := {name for name in shapes.keys() & known.keys() if shapes[name] != known[name]}:
                raise EngineProtocolError(
                    f"{server.address}: serves {folder}, whose weight {min(other)!r} has the shape "
                    f"{shapes[min(other)]} and not {known[min(other)]}: start it with the model of this run"
                )

    def num_ranks(self, address: str) -> int:
        """Return over how many processes a server's model is spread; one that nobody met is like the others."""
        like = next(iter(self._servers.values()), MetServer(address))
        return self._servers.get(address, like).num_ranks

    async def buckets(self, update: TensorUpdate, *, most_bytes: int | None = None) -> tuple[TensorBucket, ...]:
        """Return copies of the tensors as servers hold them, of about ``most_bytes`` each.

        Raises:
            EngineProtocolError: If they are not all of those, or none; nothing has been sent.
        """

        def make() -> tuple[TensorBucket, ...]:
            if not update.tensors:
                raise CheckpointError("there are none")
            tensors = update.tensors
            if self._form.stored:
                tensors = served_tensors(tensors, self._form.stored, tied_head=self._form.is_tied)
            is_on_gpu = getattr(next(iter(tensors.values())), "is_cuda", False)
            limit = most_bytes or (_GPU_BYTES if is_on_gpu else _INLINE_BYTES)
            made = tuple(make_buckets(self._form.of(tensors), most_bytes=limit))
            if made[0].bytes_B.is_cuda:
                torch.cuda.synchronize(made[0].bytes_B.device)  # others read this memory
            return made

        try:
            return await asyncio.to_thread(make)
        except CheckpointError as error:
            raise EngineProtocolError(f"weights of version {update.policy_version} do not fit: {error}") from error


@asynccontextmanager
async def weight_session(address: str, command: Command) -> AsyncIterator[None]:
    """Open SGLang's session for new weights, and end it however the block ends; servers before 0.5.23 have none.

    One that somebody has left open, who died in it, is ended first.

    Raises:
        EngineUnavailableError: If it cannot be ended: the weights are not known then.
    """
    has_sessions = True
    try:
        await command("/begin_weight_update", {})
    except EngineProtocolError as error:
        has_sessions = error.status != NOT_FOUND
        if has_sessions:
            await command("/end_weight_update", {})
            await command("/begin_weight_update", {})
    try:
        yield
    except BaseException:
        if has_sessions:
            await last_word(command("/end_weight_update", {}))
        raise
    if has_sessions:
        try:
            await command("/end_weight_update", {})
        except EngineProtocolError as error:
            raise EngineUnavailableError(f"{address}: its weights are not known: {error}") from error


@asynccontextmanager
async def vllm_session(address: str, command: Command, *, policy_version: int) -> AsyncIterator[None]:
    """Open vLLM's session for new weights, and end it with their version, or without where the block fails.

    One that somebody has left open, who died in it, is ended first: vLLM opens no second one.

    Raises:
        EngineUnavailableError: If something is refused after it was opened: the weights are not known then.
    """
    try:
        await command("/start_weight_update", None)
    except EngineUnavailableError as error:
        if error.status is None:  # it has not answered
            raise
        await command("/finish_weight_update", None)
        await command("/start_weight_update", None)
    try:
        yield
        await command("/finish_weight_update", {"weight_version": str(policy_version)})
    except BaseException as error:
        await last_word(command("/finish_weight_update", None))
        if isinstance(error, EngineProtocolError):
            raise EngineUnavailableError(f"{address}: its weights are not known: {error}") from error
        raise


async def last_word(telling: Awaitable[object]) -> None:
    """Tell a server something after a failure, of which it may know nothing or no longer answer."""
    with suppress(EngineError, TimeoutError):
        async with asyncio.timeout(_LAST_SECONDS):
            await telling

"""Adapters alone, through a folder that servers read: what ``train.lora`` trains, a hundredth of the weights or less.

vLLM takes one in the place of the last (``/v1/load_lora_adapter``, 0.32), SGLang when the last one is gone
(``/unload_lora_adapter``, ``/load_lora_adapter``, 0.5.23), which waits for the requests that use it: so servers have
none then. The weights themselves stay as they were started with.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import Command, MetServer, TransportContext
from rollfeed.types import AdapterUpdate, TensorUpdate
from rollfeed.weights.home import VersionsHome

_NAME = "rollfeed-adapter"
"""By which requests ask for it."""


class AdapterTransport:
    """Fits :class:`rollfeed.protocols.WeightTransport`: writes a folder in peft's layout for every update."""

    def __init__(self, context: TransportContext) -> None:
        self._make = VLLMAdapter if context.kind == "openai" else SGLangAdapter
        self._checkpoint = context.checkpoint or Path()
        self._home = VersionsHome(context.folder)
        self._numbers = itertools.count(1)

    def meet(self, servers: Sequence[MetServer]) -> None:
        del servers

    async def stage(self, update: TensorUpdate) -> AdapterUpdate:
        write = getattr(update.tensors, "write_adapter", None)
        if write is None:
            raise EngineProtocolError(
                'weights_transport = "adapter" publishes what train.lora trains, and these weights have no adapter: '
                'set it to "disk"'
            )
        # A version may be published twice, and vLLM keeps what it has computed by a folder it knows.
        folder = self._home.path / f"adapter-{update.policy_version}-{next(self._numbers)}"
        try:
            await asyncio.to_thread(write, folder, base=self._checkpoint)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise EngineProtocolError(
                f"the adapter of version {update.policy_version} cannot be written: {error}; make room in "
                f"{folder.parent}, or set weights_folder"
            ) from error
        self._home.keep(folder)
        return self._make(folder, adapter_name=_NAME, policy_version=update.policy_version)

    def close(self) -> None:
        self._home.close()


@dataclass(frozen=True, slots=True)
class VLLMAdapter(AdapterUpdate):
    """An adapter for vLLM, which is started with ``--enable-lora`` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."""

    async def prepare(self, address: str, command: Command) -> int:
        return 0

    async def load(self, address: str, command: Command) -> int:
        body = {"lora_name": self.adapter_name, "lora_path": str(self.folder), "load_inplace": True}
        try:
            await command("/v1/load_lora_adapter", body)
        except EngineProtocolError as error:
            raise EngineProtocolError(
                f"{error}: start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 --enable-lora and a --max-lora-rank that "
                "is not below train.lora.rank"
            ) from error
        return num_bytes(self.folder)


@dataclass(frozen=True, slots=True)
class SGLangAdapter(AdapterUpdate):
    """An adapter for SGLang, which is started with ``--enable-lora``, a rank and modules."""

    async def prepare(self, address: str, command: Command) -> int:
        return 0

    async def load(self, address: str, command: Command) -> int:
        with suppress(EngineProtocolError):  # the first time there is none
            await command("/unload_lora_adapter", {"lora_name": self.adapter_name})
        try:
            await command("/load_lora_adapter", {"lora_name": self.adapter_name, "lora_path": str(self.folder)})
            await command("/update_weight_version", {"new_version": str(self.policy_version)})
        except EngineProtocolError as error:
            raise EngineUnavailableError(
                f"{address}: has no adapter: {error}: start SGLang with --enable-lora, a --max-lora-rank that is not "
                "below train.lora.rank, and --lora-target-modules"
            ) from error
        return num_bytes(self.folder)


def num_bytes(folder: Path) -> int:
    """Return how large the files of an adapter are."""
    return sum(path.stat().st_size for path in folder.iterdir())

"""``[engine]``: what the policy runs on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field, field_validator, model_validator

from rollfeed.config.launch import LaunchSettings
from rollfeed.config.paths import checked_address
from rollfeed.config.section import FreeUnlessDeterministic, OnPurpose, Resume, Section
from rollfeed.config.servers import ServerSettings, checked_addresses

Address: TypeAlias = Annotated[str, AfterValidator(checked_address)]
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


class Kernels(StrEnum):
    """The code that computes on the CPU."""

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"


class Precision(StrEnum):
    """The number format that the embedded engine computes in."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"


class WeightUpdateMode(StrEnum):
    """The fate of running requests when weights change."""

    ABORT = "abort"
    IN_PLACE = "in_place"
    RETRACT = "retract"


class Purpose(StrEnum):
    """The use of a server's samples."""

    TRAINING = "training"
    EVALUATION = "evaluation"


class SGLangSettings(ServerSettings, resume=Resume.FREE):
    """SGLang servers: give `workers`, `router` or `[engine.launch]`; the tokenizer is that of `model.checkpoint`."""

    workers: Annotated[tuple[Address, ...], AfterValidator(checked_addresses)] = Field(default=(), strict=False)
    """Addresses of the servers, for example `["http://10.0.0.5:30000"]`; requests go to the least busy one."""
    router: Address | None = None
    """Address of a router in front of the servers; aborts and weights go to the servers that it lists."""
    concurrency: int | None = Field(default=None, ge=1, le=1_000_000)
    """Requests at all servers together; by default found from their throughput and queues."""
    max_concurrency: int = Field(default=1024, ge=1, le=1_000_000)
    """Most requests that may be found best, all servers together."""
    weight_update: WeightUpdateMode = Field(default=WeightUpdateMode.RETRACT, strict=False)
    """`retract` has the servers put back what runs and compute its keys and values again (releases before 0.5.23 are
    emptied as with `abort`); `abort` stops it, changes the weights, and goes on from the tokens so far; `in_place` lets
    it go on with keys and values of older weights.
    """

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.workers

    def at(self, addresses: tuple[str, ...]) -> SGLangSettings:
        return self.model_copy(update={"workers": addresses})

    @property
    def fixed_concurrency(self) -> int | None:
        return self.concurrency

    @property
    def most_concurrency(self) -> int:
        return self.concurrency or self.max_concurrency

    @model_validator(mode="after")
    def _fits_together(self) -> SGLangSettings:
        if self.workers and self.router is not None:
            raise ValueError(
                "workers and router are both given: remove workers to go through the router, or the router"
            )
        if self.concurrency is not None and "max_concurrency" in self.model_fields_set:
            raise ValueError("max_concurrency bounds what is found when concurrency is not given: remove one of them")
        return self


class OpenAISettings(ServerSettings, resume=Resume.FREE):
    """Servers with OpenAI's `/v1/completions`, such as vLLM's; the tokenizer is still that of `model.checkpoint`."""

    base_url: str | Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Where it is, for example `http://10.0.0.5:8000`; `/v1` at the end may be left out. Several servers of one model
    are a list; requests go to the least busy one. Without it `[engine.launch]` starts them.
    """
    model: str | None = None
    """The model's name in requests; by default the only one that the server lists."""
    purpose: Annotated[Purpose, Resume.ANSWERS] = Field(default=Purpose.TRAINING, strict=False)
    """`training` refuses a server that does not return the sampled tokens and their logprobs; `evaluation` makes do
    with text, whose tokens are then approximate and have no logprobs.
    """
    stream: bool = True
    """Receive tokens as they come: aborted and interrupted requests keep what they have. `false` costs less processor
    time, and they lose it.
    """
    concurrency: int = Field(default=256, ge=1, le=1_000_000)
    """Requests at all servers together; the others wait in this process."""
    max_concurrency: int | None = Field(default=None, ge=1, le=1_000_000)
    """Instead of `concurrency`: most requests that may be found best, from throughput and queues."""

    @property
    def addresses(self) -> tuple[str, ...]:
        return (self.base_url,) if isinstance(self.base_url, str) else self.base_url

    def at(self, addresses: tuple[str, ...]) -> OpenAISettings:
        return self.model_copy(update={"base_url": addresses})

    @property
    def fixed_concurrency(self) -> int | None:
        return self.concurrency if self.max_concurrency is None else None

    @property
    def most_concurrency(self) -> int:
        return self.max_concurrency or self.concurrency

    @field_validator("base_url", mode="after")
    @classmethod
    def _base_url_is_one(cls, given: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(given, str):
            return _without_v1(given)
        return checked_addresses(tuple(map(_without_v1, given)))

    @model_validator(mode="after")
    def _fits_together(self) -> OpenAISettings:
        if self.max_concurrency is not None and "concurrency" in self.model_fields_set:
            raise ValueError("max_concurrency bounds what is found when concurrency is not given: remove one of them")
        return self


class EngineSettings(Section, resume=Resume.ANSWERS):
    """The embedded engine, inside this process; or, with a table `[engine.sglang]` or `[engine.openai]`, servers."""

    threads: FreeUnlessDeterministic[int] = Field(default=0, ge=0, le=4096)
    """CPU threads of the embedded engine; 0 chooses by measurement when it starts, up to the physical cores open to
    this process. Use 1 on a machine that is busy with other work.
    """
    num_slots: FreeUnlessDeterministic[int] = Field(default=32, ge=1, le=4096)
    """Responses that the embedded engine decodes at once; keys and values for that many are held in memory."""
    context_length: int = Field(default=512, ge=8, le=10_000_000)
    """Tokens of prompt and response that one slot, or one request of a server, may hold."""
    kernels: FreeUnlessDeterministic[Kernels] = Field(default=Kernels.AUTO, strict=False)
    """What computes on the CPU: `native` ones, compiled on first use, or `torch`; `auto` takes native ones where they
    can be compiled.
    """
    precision: OnPurpose[Precision] = Field(default=Precision.AUTO, strict=False)
    """`auto` is exact: `fp32` on a CPU, `bf16` on a GPU. `int8` (native kernels only) holds weights and activations in
    8 bits: faster, and an approximation that samples are marked with.
    """
    device: FreeUnlessDeterministic[str] = "cpu"
    """What the embedded engine runs on: `cpu`, or a GPU such as `cuda:0`."""
    sglang: SGLangSettings | None = None
    """SGLang servers to use instead of the embedded engine."""
    openai: OpenAISettings | None = None
    """OpenAI-style servers, such as vLLM, to use instead of the embedded engine."""
    launch: LaunchSettings | None = None
    """Start these servers here, rather than to name those that somebody else has started."""

    @property
    def servers(self) -> Mapping[str, ServerSettings]:
        """The tables of servers that are given, by name: one, or none."""
        tables = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: table for name, table in tables if isinstance(table, ServerSettings)}

    @property
    def is_embedded(self) -> bool:
        """Whether the policy runs in this process."""
        return not self.servers

    @property
    def needs_weights(self) -> bool:
        """Whether the policy's weights are needed on this machine; servers of others have them themselves."""
        return self.is_embedded or self.launch is not None

    @field_validator("device", mode="after")
    @classmethod
    def _device_is_one(cls, device: str) -> str:
        if not is_device(device):
            raise ValueError(f"{device!r} is not a device: write cpu, or cuda:0 for the first GPU")
        return device

    @model_validator(mode="after")
    def _has_one_kind_of_servers(self) -> EngineSettings:
        if len(self.servers) > 1:
            raise ValueError(f"{' and '.join(self.servers)} are both given: remove one of the tables")
        if self.launch is not None and not self.servers:
            raise ValueError("launch starts servers of [engine.sglang], or of [engine.openai] (vLLM): add that table")
        for name, table in self.servers.items():
            keys = [key for key in ("workers", "router", "base_url") if getattr(table, key, None)]
            if self.launch is None and not keys:
                way = "base_url = address" if name == "openai" else "workers = [addresses], or router = address"
                raise ValueError(f"{name} names no server: give {way}, or start some with a table [engine.launch]")
            if self.launch is not None and keys:
                raise ValueError(f"{name}.{keys[0]} and launch are both given: remove one of them")
            if self.launch is not None and table.api_key_env is not None:
                raise ValueError(f"{name}.api_key_env: servers of launch are open to this machine only: remove it")
        return self


def is_device(name: str) -> bool:
    """Tell whether this names something to compute on: ``cpu``, ``cuda`` or ``cuda:0``."""
    return _DEVICE.fullmatch(name) is not None


def _without_v1(text: str) -> str:
    return checked_address(text, has_path=True).removesuffix("/v1").rstrip("/")

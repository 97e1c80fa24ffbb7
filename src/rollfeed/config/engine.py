"""``[engine]``: what the policy runs on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field, field_validator, model_validator

from rollfeed.config.api_key import KeyVariable
from rollfeed.config.paths import checked_address
from rollfeed.config.section import FreeUnlessDeterministic, OnPurpose, Resume, Section

Address: TypeAlias = Annotated[str, AfterValidator(checked_address)]
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


class Kernels(StrEnum):
    """What computes on the CPU."""

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"


class Precision(StrEnum):
    """What the embedded engine computes in."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"


class WeightUpdateMode(StrEnum):
    """What happens to running requests when weights change."""

    ABORT = "abort"
    IN_PLACE = "in_place"
    RETRACT = "retract"


class Purpose(StrEnum):
    """What the samples of a server are for."""

    TRAINING = "training"
    EVALUATION = "evaluation"


class SGLangSettings(Section, resume=Resume.FREE):
    """SGLang servers: give either `workers` or `router`; the tokenizer is still that of `model.checkpoint`."""

    workers: tuple[Address, ...] = Field(default=(), strict=False)
    """Addresses of the servers, for example `["http://10.0.0.5:30000"]`; requests go to the least busy one."""
    router: Address | None = None
    """Address of a router in front of the servers; aborts and weights go to the servers that it lists."""
    api_key_env: KeyVariable | None = None
    """Name of the environment variable that holds the key of all servers and the router, as they have it by
    `--api-key`. The key itself is stored nowhere.
    """
    concurrency: int | None = Field(default=None, ge=1, le=1_000_000)
    """Requests at all servers together; by default found from their throughput and queues."""
    max_concurrency: int = Field(default=1024, ge=1, le=1_000_000)
    """Most requests that may be found best, all servers together."""
    max_connections: int | None = Field(default=None, ge=1, le=1_000_000)
    """Connections for generation; by default one a request."""
    request_timeout_seconds: float = Field(default=900.0, gt=0.0, le=604_800.0, strict=False)
    """For one request from its turn on: all its tries, and the pauses between them, together."""
    max_tries: int = Field(default=10, ge=1, le=1000)
    """Of one request, when connections fail or replies have a 5xx status; what a server calls wrong fails at once."""
    probe_interval_seconds: float = Field(default=5.0, gt=0.0, le=3600.0, strict=False)
    """Between two health probes of a server."""
    probe_timeout_seconds: float = Field(default=5.0, gt=0.0, le=3600.0, strict=False)
    """For the answer to a probe."""
    probes_until_dead: int = Field(default=3, ge=1, le=1000)
    """Failed probes in a row after which a server has no more requests; it returns when it is healthy and has the
    current weights.
    """
    startup_timeout_seconds: float = Field(default=60.0, gt=0.0, le=86_400.0, strict=False)
    """For every server to be healthy when the run starts."""
    control_timeout_seconds: float = Field(default=30.0, gt=0.0, le=86_400.0, strict=False)
    """For an abort, a pause or a look at the load."""
    update_timeout_seconds: float = Field(default=600.0, gt=0.0, le=86_400.0, strict=False)
    """For a server to load new weights."""
    weight_update: WeightUpdateMode = Field(default=WeightUpdateMode.ABORT, strict=False)
    """`abort` stops what runs, changes the weights, and goes on from the tokens so far; `retract` has the servers put
    it back and compute its keys and values again; `in_place` lets it go on with keys and values of older weights.
    """
    weights_folder: str | None = None
    """Where new weights are written for the servers to load, a folder that they can read under the same path; by
    default a temporary one, which is enough for servers on this machine.
    """

    @field_validator("workers", mode="after")
    @classmethod
    def _workers_differ(cls, workers: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(workers)) != len(workers):
            raise ValueError("an address is given twice; remove one")
        return workers

    @model_validator(mode="after")
    def _fits_together(self) -> SGLangSettings:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        if self.workers and self.router is not None:
            yield "workers and router are both given: remove workers to go through the router, or the router"
        if not self.workers and self.router is None:
            yield "no server: give workers = [addresses], or router = address"
        if self.concurrency is not None and "max_concurrency" in self.model_fields_set:
            yield "max_concurrency bounds what is found when concurrency is not given: remove one of them"


class OpenAISettings(Section, resume=Resume.FREE):
    """A server with OpenAI's `/v1/completions`, such as vLLM's; the tokenizer is still that of `model.checkpoint`."""

    base_url: str
    """Where it is, for example `http://10.0.0.5:8000`; `/v1` at the end may be left out."""
    model: str | None = None
    """The model's name in requests; by default the only one that the server lists."""
    api_key_env: KeyVariable | None = None
    """Name of the environment variable that holds the key. The key itself is stored nowhere."""
    purpose: Annotated[Purpose, Resume.ANSWERS] = Field(default=Purpose.TRAINING, strict=False)
    """`training` refuses a server that does not return the sampled tokens and their logprobs; `evaluation` makes do
    with text, whose tokens are then approximate and have no logprobs.
    """
    stream: bool = True
    """Receive tokens as they come: aborted and interrupted requests keep what they have. `false` costs less processor
    time, and they lose it.
    """
    concurrency: int = Field(default=256, ge=1, le=1_000_000)
    """Requests at the server at once; the others wait in this process."""
    request_timeout_seconds: float = Field(default=900.0, gt=0.0, le=604_800.0, strict=False)
    """For one request from its turn on: all its tries, and the pauses between them, together."""
    max_tries: int = Field(default=10, ge=1, le=1000)
    """Of one request, when connections fail or replies have a 5xx status; what the server calls wrong fails at once."""
    startup_timeout_seconds: float = Field(default=60.0, gt=0.0, le=86_400.0, strict=False)
    """For the server to be healthy, and to answer a first request, when the run starts."""
    control_timeout_seconds: float = Field(default=30.0, gt=0.0, le=86_400.0, strict=False)
    """For a pause or a look at the health."""
    update_timeout_seconds: float = Field(default=600.0, gt=0.0, le=86_400.0, strict=False)
    """For the server to load new weights."""
    weights_folder: str | None = None
    """Where new weights are written for the server to load, a folder that it can read under the same path; by default
    a temporary one, which is enough for a server on this machine.
    """

    @field_validator("base_url", mode="after")
    @classmethod
    def _base_url_is_one(cls, text: str) -> str:
        return checked_address(text, has_path=True).removesuffix("/v1").rstrip("/")


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
    """An OpenAI-style server, such as vLLM, to use instead of the embedded engine."""

    @property
    def is_embedded(self) -> bool:
        """Whether the policy runs in this process, and its weights are needed here."""
        return self.sglang is None and self.openai is None

    @field_validator("device", mode="after")
    @classmethod
    def _device_is_one(cls, device: str) -> str:
        if not is_device(device):
            raise ValueError(f"{device!r} is not a device: write cpu, or cuda:0 for the first GPU")
        return device

    @model_validator(mode="after")
    def _has_one_kind_of_servers(self) -> EngineSettings:
        if self.sglang is not None and self.openai is not None:
            raise ValueError("sglang and openai are both given: remove one of the tables")
        return self


def is_device(name: str) -> bool:
    """Tell whether this names something to compute on: ``cpu``, ``cuda`` or ``cuda:0``."""
    return _DEVICE.fullmatch(name) is not None

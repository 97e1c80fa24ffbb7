"""``[engine.openai]``: a server that speaks OpenAI's completions, such as vLLM."""

from __future__ import annotations

from enum import StrEnum
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from rollfeed.config.api_key import KeyVariable
from rollfeed.config.section import Section


class Purpose(StrEnum):
    """What the samples of a server are for."""

    TRAINING = "training"
    EVALUATION = "evaluation"


class OpenAISettings(Section):
    """A server with OpenAI's `/v1/completions`, such as vLLM's; the tokenizer is still that of `model.checkpoint`."""

    base_url: str
    """Where it is, for example `http://10.0.0.5:8000`; `/v1` at the end may be left out."""
    model: str | None = None
    """The model's name in requests; by default the only one that the server lists."""
    api_key_env: KeyVariable | None = None
    """Name of the environment variable that holds the key. The key itself is stored nowhere."""
    purpose: Purpose = Field(default=Purpose.TRAINING, strict=False)
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
        form = "write it as http://host:port"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{text!r} is not an address ({error}): {form}") from None
        if parts.username is not None:
            raise ValueError("it has a user name in it: name the variable that holds the key as api_key_env instead")
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or any(map(str.isspace, text)):
            raise ValueError(f"{text!r} is not an address: {form}")
        if parts.query or parts.fragment:
            raise ValueError(f"{text!r} has more than an address in it: {form}")
        return text.rstrip("/").removesuffix("/v1").rstrip("/")

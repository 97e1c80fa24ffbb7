"""SGLang's protocol, as far as the embedded engine's server and the fake one speak it alike."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

ABORTED: dict[str, Any] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
"""The finish reason of what was aborted."""
DEFAULT_VERSION = "default"
"""The weight version of a server whose weights have not been replaced."""
DEFAULT_MAX_NEW_TOKENS = 128
"""For requests that do not say."""


CHARACTERS_OF_A_TOKEN = 64
"""More than texts have on average: what is longer than a context of such is not even tokenised."""
_LONGEST_ID = 512


class RequestError(Exception):
    """A request that is refused: the client is told the HTTP status and one line."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The load of an engine."""

    num_running: int
    num_waiting: int
    num_used_tokens: int
    """Prompt and sampled tokens of running requests."""
    num_uncached_tokens: int
    """Prompt tokens of waiting requests."""
    max_total_tokens: int
    max_running: int
    tokens_per_second: float
    generated_tokens: int
    """Since the start."""
    cache_hit_rate: float = 0.0
    prefilled_tokens: int = 0
    """Since the start, without cached ones."""
    prefill_seconds: float = 0.0
    """Of these."""
    num_retracted: int = 0
    """Requests put back lately for want of room."""
    busy_slot_seconds: float = 0.0
    """Of engine time, all slots together, in which a slot held a request; only a time model counts them."""

    def load(self, include: str | None = "core") -> dict[str, Any]:
        """Return an entry of ``/v1/loads``; ``include`` names its sections, None takes all."""
        sections = set() if include is None else {each.strip() for each in include.split(",")}
        has_queues = include is None or not sections.isdisjoint(("all", "queues"))
        queues = {"waiting": self.num_waiting, "grammar": 0, "paused": 0, "retracted": self.num_retracted}
        return {
            "dp_rank": 0,
            "num_running_reqs": self.num_running,
            "num_waiting_reqs": self.num_waiting,
            "num_waiting_uncached_tokens": self.num_uncached_tokens,
            "num_used_tokens": self.num_used_tokens,
            "num_total_tokens": self.num_used_tokens + self.num_uncached_tokens,
            "max_total_num_tokens": self.max_total_tokens,
            "max_running_requests": self.max_running,
            "token_usage": self.num_used_tokens / self.max_total_tokens,
            "gen_throughput": self.tokens_per_second,
            "cache_hit_rate": self.cache_hit_rate,
            "utilization": self.num_running / self.max_running,
            **({"queues": {**queues, "prealloc_ready": 0}} if has_queues else {}),
        }

    def old_load(self) -> list[dict[str, Any]]:
        """Return the reply of ``/get_load``."""
        load = {
            "dp_rank": 0,
            "num_reqs": self.num_running + self.num_waiting,
            "num_waiting_reqs": self.num_waiting,
            "num_tokens": self.num_used_tokens,
        }
        return [load]


def model_info(
    *,
    model_path: str,
    tokenizer_path: str,
    weight_version: str,
    config: Mapping[str, Any],
    takes_pictures: bool = False,
) -> dict[str, Any]:
    """Return the reply of ``/model_info``; ``config`` is the checkpoint's ``config.json``."""
    return {
        "model_path": model_path,
        "tokenizer_path": tokenizer_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": weight_version,
        "has_image_understanding": takes_pictures,
        "has_audio_understanding": False,
        "model_type": config.get("model_type"),
        "architectures": config.get("architectures"),
    }


def model_list(*, name: str, created: int, owner: str, context_length: int, **more: Any) -> dict[str, Any]:
    """Return the reply of ``/v1/models``."""
    model = {"id": name, "object": "model", "created": created, "owned_by": owner, "root": name, **more}
    return {"object": "list", "data": [{**model, "max_model_len": context_length}]}


def error_content(message: str) -> dict[str, Any]:
    """Return the JSON of a refused request."""
    return {"error": {"message": message}}


def check_prompt_length(num_tokens: int, context_length: int) -> None:
    """Raise RequestError for a prompt that is empty or longer than the context."""
    if num_tokens == 0:
        raise RequestError("The input has no tokens.")
    if num_tokens > context_length:
        raise RequestError(
            f"The input ({num_tokens} tokens) is longer than the model's context length ({context_length} tokens)."
        )


def check_text_length(text: str, context_length: int) -> None:
    """Raise RequestError for a text that no context has room for, before it is tokenised."""
    if len(text) > CHARACTERS_OF_A_TOKEN * context_length:
        raise RequestError(
            f"The input ({len(text)} characters) is longer than the model's context length ({context_length} tokens)."
        )


def check_num_responses(num_responses: int, most: int) -> None:
    """Raise RequestError for more responses than can ever be inside at once."""
    if num_responses > most:
        raise RequestError(f"{num_responses} responses in one request: at most {most} fit into this server")


def checked_new_tokens(
    max_new_tokens: int | None, *, prompt_tokens: int, context_length: int, default: int = DEFAULT_MAX_NEW_TOKENS
) -> int:
    """Return how many tokens a response may have. Raises RequestError if the context has no room for so many."""
    room = context_length - prompt_tokens
    if max_new_tokens is None:
        return min(default, room)
    if max_new_tokens < 0:
        raise RequestError(f"max_new_tokens must be at least 0, got {max_new_tokens}.")
    if max_new_tokens > room:
        raise RequestError(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens."
            f" You requested a total of {prompt_tokens + max_new_tokens} tokens: {prompt_tokens} tokens from the"
            f" input messages and {max_new_tokens} tokens for the completion."
        )
    return max_new_tokens


def one_each(value: Any, size: int, name: str) -> list[Any]:
    """Return a field of one value for all prompts, or of a list of one for each, as a list."""
    values: list[Any] = value if isinstance(value, list) else [value] * size
    if len(values) != size:
        raise RequestError(f"{name} has {len(values)} entries for {size} prompts")
    return values


def request_ids(rid: str | Sequence[str] | None, size: int) -> list[str]:
    """Return the ids of the prompts of a call; one id for several prompts is numbered, no id is made up."""
    if rid is None:
        return [new_request_id() for _ in range(size)]
    check_id_length(rid if isinstance(rid, str) else max(rid, key=len, default=""))
    if isinstance(rid, str):
        return [rid] if size == 1 else [sample_id(rid, index) for index in range(size)]
    return one_each(list(rid), size, "rid")


def check_id_length(rid: str) -> None:
    """Raise RequestError for an id that is too long to be kept for every response."""
    if len(rid) > _LONGEST_ID:
        raise RequestError(f"rid is longer than {_LONGEST_ID} characters")


def new_request_id() -> str:
    """Return an id for a request that came without one."""
    return secrets.token_hex(16)


def sample_id(request_id: str, index: int) -> str:
    """Return the id of one of several samples of a request."""
    return f"{request_id}_{index}"


def base_id(request_id: str) -> str | None:
    """Return the id of the request of which this may be one of several samples; None if it cannot be one."""
    base, _, number = request_id.rpartition("_")
    return base if base and number.isdigit() else None


def is_sample_of(request_id: str, base: str) -> bool:
    """Whether an id is a request's own, or that of one of several samples of it."""
    return request_id == base or (request_id.startswith(f"{base}_") and request_id[len(base) + 1 :].isdigit())

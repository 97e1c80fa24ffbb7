"""Requests for tokens, in the form of the route that they go to."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from rollfeed.engine.client.flights import Flight
from rollfeed.engine.http import json_ids

_ENCODER = msgspec.json.Encoder()
_SEED_MASK = (1 << 63) - 1
_SEED_STRIDE = 0x9E3779B97F4A7C15


class Route(Enum):
    """A way to ask for a response; what comes first is tried first."""

    TOKENS = "/inference/v1/generate"
    """vLLM's: tokens in, tokens out, no text."""
    COMPLETIONS = "/v1/completions"
    """With vLLM's extensions, by which it returns token ids."""
    PLAIN = "/v1/completions without extensions"
    """What every OpenAI-style server understands; good for text."""

    @property
    def path(self) -> str:
        """Path of it on the server."""
        return self.value.split(" ")[0]


def encode_request(flight: Flight, *, route: Route, model: str, stream: bool) -> bytes:
    """Return the JSON that asks for the rest of a flight's response, under its present ``rid``."""
    body: dict[str, Any] = {"model": model, "stream": stream}
    if route is Route.TOKENS:
        body |= {
            "request_id": flight.rid,
            "token_ids": json_ids(flight.sent_ids),
            "sampling_params": {**_extended(flight), "logprobs": 0},
        }
        if flight.shown is not None:
            parts = [{"type": "image_url", "url": uri} for uri in flight.shown.data_uris]
            body |= {"content_parts": parts, "return_token_ids": True}
    elif route is Route.COMPLETIONS:
        body |= {
            "request_id": flight.rid,
            "prompt": json_ids(flight.input_ids),
            **_extended(flight),
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
    else:
        body |= {"prompt": flight.prompt_ids.tolist(), **_plain(flight)}
    if stream and route is not Route.PLAIN:
        body["stream_options"] = {"include_usage": True}
    return _ENCODER.encode(body)


def _extended(flight: Flight) -> dict[str, Any]:
    """Every parameter, since a server takes what is left out from the model's own defaults."""
    params, num_sampled = flight.params, flight.num_sampled
    given: dict[str, Any] = {
        "n": 1,
        "max_tokens": params.max_new_tokens - num_sampled,
        "min_tokens": max(0, params.min_new_tokens - num_sampled),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": 0.0,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "skip_special_tokens": params.skip_special_tokens,
        "spaces_between_special_tokens": params.spaces_between_special_tokens,
        "include_stop_str_in_output": params.no_stop_trim,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
    }
    if params.seed is not None:
        # Draws are keyed by the seed and the position in the reply: what goes on needs draws of its own.
        given["seed"] = (params.seed + _SEED_STRIDE * num_sampled) & _SEED_MASK
    return given


def _plain(flight: Flight) -> dict[str, Any]:
    """What OpenAI's own service knows, and of the rest what was really asked for."""
    params = flight.params
    given: dict[str, Any] = {
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
    }
    if params.stop:
        given["stop"] = list(params.stop)
    if params.seed is not None:
        given["seed"] = params.seed & _SEED_MASK
    others: list[tuple[str, Any, Any]] = [
        ("top_k", params.top_k, -1),
        ("min_tokens", params.min_new_tokens, 0),
        ("repetition_penalty", params.repetition_penalty, 1.0),
        ("stop_token_ids", list(params.stop_token_ids), []),
    ]
    given.update({name: value for name, value, neutral in others if value != neutral})
    return given

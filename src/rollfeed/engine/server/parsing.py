"""From the JSON of ``/generate`` to jobs. Names and defaults are SGLang's."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.engine.server.service import sample_id
from rollfeed.engine.server.state import Job, RequestError
from rollfeed.protocols import Tokenizer
from rollfeed.types import SamplingParams

_DEFAULT_MAX_NEW_TOKENS = 128
_MAX_SAMPLES = 4096
_LARGEST_ID = 2**31 - 1

_LARGEST_SAMPLING_MASK = 4096
_REFUSED_FIELDS = ("image_data", "video_data", "audio_data", "input_embeds", "lora_path", "session_params")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "min_p": (0, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "beam_width": (1, None),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, [], ""),
    "logit_bias": (None, {}),
    "custom_params": (None,),
    "stream_interval": (None, 1),
}
"""Sampling parameters that this engine does not have, with the values that change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A whole ``/generate`` call."""

    jobs: Sequence[Job]
    is_single: bool
    """Whether the reply is one object instead of a list."""
    stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What ``sampling_params`` says."""

    params: SamplingParams
    num_samples: int
    ignore_eos: bool


def parse_generate(body: Any, *, tokenizer: Tokenizer, context_length: int) -> GenerateCall:
    """Return the jobs of a body.

    Raises:
        RequestError: If it cannot be served; the message is one line for the client.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    for name in _REFUSED_FIELDS:
        if body.get(name) not in (None, [], ""):
            raise RequestError(f"{name} is not supported: this server takes text only")
    prompts, is_batch = _prompts(body, tokenizer)
    size = len(prompts)
    for prompt_ids in prompts:
        check_length(len(prompt_ids), context_length)
    samplings = [
        parse_sampling(each, room=context_length - len(prompt_ids), prompt_tokens=len(prompt_ids))
        for each, prompt_ids in zip(_spread(body, "sampling_params", dict, size, {}), prompts, strict=True)
    ]
    rids = _rids(body, size)
    logprobs = _spread(body, "return_logprob", bool, size, False)
    masks = _spread(body, "return_sampling_mask", bool, size, False)
    starts = _spread(body, "logprob_start_len", int, size, -1)
    jobs: list[Job] = []
    for index, prompt_ids in enumerate(prompts):
        score_from = _score_from(starts[index], len(prompt_ids)) if logprobs[index] else None
        sampling = _with_mask(samplings[index]) if masks[index] else samplings[index]
        jobs += make_jobs(prompt_ids, sampling, rid=rids[index], return_logprob=logprobs[index], score_from=score_from)
    return GenerateCall(jobs=jobs, is_single=not is_batch and len(jobs) == 1, stream=_flag(body, "stream"))


def _with_mask(sampling: Sampling) -> Sampling:
    if not 1 <= sampling.params.top_k <= _LARGEST_SAMPLING_MASK:
        raise RequestError(
            f"return_sampling_mask requires a finite top_k of at most {_LARGEST_SAMPLING_MASK}; got "
            f"top_k={sampling.params.top_k}."
        )
    return replace(sampling, params=replace(sampling.params, return_sampling_mask=True))


def make_jobs(
    prompt_ids: NDArray[np.int32],
    sampling: Sampling,
    *,
    rid: str,
    return_logprob: bool,
    score_from: int | None = None,
) -> list[Job]:
    """Return a job for each sample of a prompt; several have ids of their own."""
    several = sampling.num_samples > 1
    return [
        Job(
            request_id=sample_id(rid, index) if several else rid,
            token_ids=prompt_ids,
            params=_seeded(sampling.params, index),
            ignore_eos=sampling.ignore_eos,
            return_logprob=return_logprob,
            score_from=score_from,
        )
        for index in range(sampling.num_samples)
    ]


def parse_sampling(given: Mapping[str, Any], *, room: int, prompt_tokens: int) -> Sampling:
    """Return sampling parameters.

    Args:
        given: SGLang's ``sampling_params``.
        room: Tokens that the context leaves for the response.
        prompt_tokens: For the message when they do not suffice.
    """
    unknown = sorted(given.keys() - _KNOWN)
    if unknown:
        raise RequestError(f"sampling_params: {unknown[0]!r} is not a sampling parameter of this server")
    for name, neutral in _NEUTRAL.items():
        if name in given and given[name] not in neutral:
            raise RequestError(f"sampling_params: {name} is not supported by this server")
    max_new_tokens = _integer(given, "max_new_tokens", min(_DEFAULT_MAX_NEW_TOKENS, room))
    if max_new_tokens < 0:
        raise RequestError(f"max_new_tokens must be at least 0, got {max_new_tokens}.")
    if max_new_tokens > room:
        raise RequestError(
            f"Requested token count exceeds the model's maximum context length of {room + prompt_tokens} tokens."
            f" You requested a total of {prompt_tokens + max_new_tokens} tokens: {prompt_tokens} tokens from the"
            f" input messages and {max_new_tokens} tokens for the completion."
        )
    num_samples = _integer(given, "n", 1)
    if not 1 <= num_samples <= _MAX_SAMPLES:
        raise RequestError(f"n must be at least 1 and at most {_MAX_SAMPLES}, got {num_samples}.")
    ignore_eos = _flag(given, "ignore_eos")
    try:
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=_number(given, "temperature", 1.0),
            top_p=_number(given, "top_p", 1.0),
            top_k=_top_k(given),
            min_new_tokens=_integer(given, "min_new_tokens", 0),
            repetition_penalty=_number(given, "repetition_penalty", 1.0),
            stop=_strings(given, "stop"),
            stop_token_ids=() if ignore_eos else _integers(given, "stop_token_ids"),
            skip_special_tokens=_flag(given, "skip_special_tokens", True),
            no_stop_trim=_flag(given, "no_stop_trim"),
            spaces_between_special_tokens=_flag(given, "spaces_between_special_tokens", True),
            seed=_integer(given, "sampling_seed", 0) if given.get("sampling_seed") is not None else None,
        )
    except ValueError as error:
        raise RequestError(f"sampling_params: {error}") from error
    return Sampling(params=params, num_samples=num_samples, ignore_eos=ignore_eos)


_KNOWN = {*_NEUTRAL, "max_new_tokens", "n", "ignore_eos", "temperature", "top_p", "top_k", "min_new_tokens"} | {
    *("repetition_penalty", "stop", "stop_token_ids", "skip_special_tokens", "no_stop_trim", "sampling_seed"),
    "spaces_between_special_tokens",
}


def check_length(num_tokens: int, context_length: int) -> None:
    """Raise RequestError for a prompt that is empty or longer than the context."""
    if num_tokens == 0:
        raise RequestError("The input has no tokens.")
    if num_tokens > context_length:
        raise RequestError(
            f"The input ({num_tokens} tokens) is longer than the model's context length ({context_length} tokens)."
        )


def token_array(values: Any, *, name: str = "input_ids") -> NDArray[np.int32]:
    """Return a JSON list of token ids as an array. ``(P,)``."""
    try:
        ids = np.asarray(values)
    except (ValueError, OverflowError):
        ids = np.empty(0, np.float64)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise RequestError(f"{name} must be a list of integers")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= _LARGEST_ID:
        raise RequestError(f"{name}: token ids must be at least 0 and below the size of the vocabulary")
    return ids.astype(np.int32)


def new_rid() -> str:
    """Return an id for a request that came without one."""
    return secrets.token_hex(16)


def _prompts(body: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[list[NDArray[np.int32]], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise RequestError("Either text or input_ids should be provided, and not both.")
    if ids is not None:
        if not isinstance(ids, list):
            raise RequestError("input_ids must be a list of integers, or a list of such lists")
        is_batch = bool(ids) and isinstance(ids[0], list)
        return [token_array(each) for each in (ids if is_batch else [ids])], is_batch
    texts: list[Any] = text if isinstance(text, list) else [text]
    if not texts or not all(isinstance(each, str) for each in texts):
        raise RequestError("text must be a string, or a list of strings")
    return [tokenizer.encode(each, add_special_tokens=True) for each in texts], isinstance(text, list)


def _rids(body: Mapping[str, Any], size: int) -> list[str]:
    rid = body.get("rid")
    if rid is None:
        return [new_rid() for _ in range(size)]
    if isinstance(rid, str):
        return [rid] if size == 1 else [sample_id(rid, index) for index in range(size)]
    if not isinstance(rid, list) or len(rid) != size or not all(isinstance(each, str) for each in rid):
        raise RequestError(f"rid must be a string, or a list of {size} strings")
    return rid


def _spread(body: Mapping[str, Any], name: str, kind: type, size: int, default: Any) -> list[Any]:
    """Return a field of one value for all prompts, or of a list of one for each, as a list."""
    value = body.get(name)
    values = value if isinstance(value, list) else [value] * size
    values = [default if each is None else each for each in values]
    if len(values) != size:
        raise RequestError(f"{name} has {len(values)} entries for {size} prompts")
    if not all(type(each) is kind for each in values):
        raise RequestError(f"{name} must be {_KIND_NAMES[kind]}, or a list of such")
    return values


_KIND_NAMES = {dict: "an object", bool: "true or false", int: "an integer"}


def _score_from(start: int, prompt_tokens: int) -> int | None:
    if start < 0:
        return None
    if start > prompt_tokens:
        raise RequestError(f"logprob_start_len ({start}) is higher than the number of input tokens ({prompt_tokens}).")
    return start


def _seeded(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of one of several samples, which must not all draw the same."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=params.seed + index)


def _top_k(given: Mapping[str, Any]) -> int:
    top_k = _integer(given, "top_k", -1)
    return -1 if top_k == 0 else top_k


def _value(given: Mapping[str, Any], name: str, default: Any, fits: Callable[[Any], bool], kind: str) -> Any:
    value = given.get(name)
    if value is None:
        return default
    if not fits(value):
        raise RequestError(f"{name} must be {kind}")
    return value


def _integer(given: Mapping[str, Any], name: str, default: int) -> int:
    value: int = _value(given, name, default, lambda v: type(v) is int and abs(v) < 2**64, "an integer")
    return value


def _number(given: Mapping[str, Any], name: str, default: float) -> float:
    return float(_value(given, name, default, lambda v: type(v) in (int, float), "a number"))


def _flag(given: Mapping[str, Any], name: str, default: bool = False) -> bool:
    return bool(_value(given, name, default, lambda v: isinstance(v, bool), "true or false"))


def _strings(given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = given.get(name)
    values = [value] if isinstance(value, str) else value or []
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise RequestError(f"{name} must be a string, or a list of strings")
    return tuple(values)


def _integers(given: Mapping[str, Any], name: str) -> tuple[int, ...]:
    values = given.get(name) or []
    if not isinstance(values, list) or not all(type(each) is int for each in values):
        raise RequestError(f"{name} must be a list of integers")
    return tuple(values)

"""From the JSON of ``/generate`` to jobs. Names and defaults are SGLang's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rollfeed.base.sglang_wire import (
    RequestError,
    check_num_responses,
    check_prompt_length,
    check_text_length,
    checked_new_tokens,
    one_each,
    request_ids,
    sample_id,
)
from rollfeed.engine.server.service import ServerJob
from rollfeed.protocols import Tokenizer
from rollfeed.types import SamplingParams

_MAX_SAMPLES = 4096
_LARGEST_ID = 2**31 - 1
_LARGEST_SAMPLING_MASK = 4096
_REFUSED_FIELDS = ("video_data", "audio_data", "input_embeds", "lora_path", "session_params")
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

_Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_Stop = Annotated[str, Meta(max_length=1024)]
_KINDS = {dict: "an object", bool: "true or false", int: "an integer"}


class _SamplingFields(msgspec.Struct):
    """``sampling_params`` as they may be given; null stands for the default."""

    max_new_tokens: _Int32 | None = None
    n: _Int32 | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: _Int32 | None = None
    min_new_tokens: _Int32 | None = None
    repetition_penalty: float | None = None
    stop: _Stop | Annotated[tuple[_Stop, ...], Meta(max_length=256)] | None = None
    stop_token_ids: Annotated[tuple[_Int32, ...], Meta(max_length=4096)] | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    spaces_between_special_tokens: bool | None = None
    sampling_seed: int | None = None
    """64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A whole ``/generate`` call."""

    jobs: Sequence[ServerJob]
    is_single: bool
    """Whether the reply is one object instead of a list."""
    stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters as read from ``sampling_params``."""

    params: SamplingParams
    num_samples: int
    ignore_eos: bool


def parse_generate(body: Any, *, tokenizer: Tokenizer, context_length: int, most_jobs: int) -> GenerateCall:
    """Return the jobs of a body. Raises RequestError if it cannot be served; the message is one line for the client."""
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    if not isinstance(body.get("stream"), bool | None):
        raise RequestError("stream must be true or false")
    for name in _REFUSED_FIELDS:
        if body.get(name) not in (None, [], ""):
            raise RequestError(f"{name} is not supported: this server takes text and pictures only")
    prompts, is_batch = _prompts(body, tokenizer, context_length=context_length, most=most_jobs)
    size = len(prompts)
    for prompt_ids in prompts:
        check_prompt_length(len(prompt_ids), context_length)
    samplings = [
        parse_sampling(each, prompt_tokens=len(prompt_ids), context_length=context_length)
        for each, prompt_ids in zip(_spread(body, "sampling_params", dict, size, {}), prompts, strict=True)
    ]
    check_num_responses(sum(each.num_samples for each in samplings), most_jobs)
    rid = body.get("rid")
    if not (rid is None or isinstance(rid, str) or (isinstance(rid, list) and all(isinstance(r, str) for r in rid))):
        raise RequestError(f"rid must be a string, or a list of {size} strings")
    rids = request_ids(rid, size)
    logprobs = _spread(body, "return_logprob", bool, size, False)
    masks = _spread(body, "return_sampling_mask", bool, size, False)
    routed = _spread(body, "return_routed_experts", bool, size, False)
    starts = _spread(body, "logprob_start_len", int, size, -1)
    jobs: list[ServerJob] = []
    for index, prompt_ids in enumerate(prompts):
        score_from = _score_from(starts[index], len(prompt_ids)) if logprobs[index] else None
        sampling = _with_mask(samplings[index]) if masks[index] else samplings[index]
        if routed[index]:
            sampling = replace(sampling, params=replace(sampling.params, return_routed_experts=True))
        jobs += make_jobs(prompt_ids, sampling, rid=rids[index], return_logprob=logprobs[index], score_from=score_from)
    return GenerateCall(jobs=jobs, is_single=not is_batch and len(jobs) == 1, stream=body.get("stream") is True)


def _with_mask(sampling: Sampling) -> Sampling:
    if not 1 <= sampling.params.top_k <= _LARGEST_SAMPLING_MASK:
        raise RequestError(
            f"return_sampling_mask requires a finite top_k of at most {_LARGEST_SAMPLING_MASK}; got "
            f"top_k={sampling.params.top_k}."
        )
    return replace(sampling, params=replace(sampling.params, return_sampling_mask=True))


def make_jobs(
    prompt_ids: NDArray[np.int32], sampling: Sampling, *, rid: str, return_logprob: bool, score_from: int | None = None
) -> list[ServerJob]:
    """Return a job for each sample of a prompt; several have ids of their own."""
    several = sampling.num_samples > 1
    return [
        ServerJob(
            request_id=sample_id(rid, index) if several else rid,
            token_ids=prompt_ids,
            params=_seeded(sampling.params, index),
            ignore_eos=sampling.ignore_eos,
            return_logprob=return_logprob,
            score_from=score_from,
        )
        for index in range(sampling.num_samples)
    ]


def parse_sampling(given: Mapping[str, Any], *, prompt_tokens: int, context_length: int) -> Sampling:
    """Return sampling parameters. ``given`` are SGLang's ``sampling_params``."""
    for name, neutral in _NEUTRAL.items():
        if name in given and given[name] not in neutral:
            raise RequestError(f"sampling_params: {name} is not supported by this server")
    asked = _read_sampling({name: value for name, value in given.items() if name not in _NEUTRAL})
    num_samples = 1 if asked.n is None else asked.n
    if not 1 <= num_samples <= _MAX_SAMPLES:
        raise RequestError(f"n must be at least 1 and at most {_MAX_SAMPLES}, got {num_samples}.")
    if asked.sampling_seed is not None and not -(2**63) <= asked.sampling_seed < 2**64:
        raise RequestError(f"sampling_params: sampling_seed has 64 bits, got {asked.sampling_seed}.")
    stop = (asked.stop,) if isinstance(asked.stop, str) else asked.stop
    fields: dict[str, Any] = {
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": -1 if asked.top_k == 0 else asked.top_k,
        "min_new_tokens": asked.min_new_tokens,
        "repetition_penalty": asked.repetition_penalty,
        "stop": stop or None,
        "stop_token_ids": None if asked.ignore_eos else asked.stop_token_ids,
        "skip_special_tokens": asked.skip_special_tokens is not False,
        "no_stop_trim": asked.no_stop_trim is True,
        "spaces_between_special_tokens": asked.spaces_between_special_tokens is not False,
        "seed": asked.sampling_seed,
    }
    max_new_tokens = checked_new_tokens(
        asked.max_new_tokens, prompt_tokens=prompt_tokens, context_length=context_length
    )
    try:
        params = SamplingParams(
            max_new_tokens=max_new_tokens, **{name: value for name, value in fields.items() if value is not None}
        )
    except ValueError as error:
        raise RequestError(f"sampling_params: {error}") from error
    return Sampling(params=params, num_samples=num_samples, ignore_eos=asked.ignore_eos is True)


def _read_sampling(given: Mapping[str, Any]) -> _SamplingFields:
    unknown = sorted(given.keys() - set(_SamplingFields.__struct_fields__))
    if unknown:
        raise RequestError(f"sampling_params: {unknown[0]!r} is not a sampling parameter of this server")
    try:
        return msgspec.convert(given, _SamplingFields)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling_params: {error}") from None


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


def _prompts(
    body: Mapping[str, Any], tokenizer: Tokenizer, *, context_length: int, most: int
) -> tuple[list[NDArray[np.int32]], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise RequestError("Either text or input_ids should be provided, and not both.")
    if ids is not None:
        if not isinstance(ids, list):
            raise RequestError("input_ids must be a list of integers, or a list of such lists")
        is_batch = bool(ids) and isinstance(ids[0], list)
        check_num_responses(len(ids) if is_batch else 1, most)
        return [token_array(each) for each in (ids if is_batch else [ids])], is_batch
    texts: list[Any] = text if isinstance(text, list) else [text]
    if not texts or not all(isinstance(each, str) for each in texts):
        raise RequestError("text must be a string, or a list of strings")
    check_num_responses(len(texts), most)
    for each in texts:
        check_text_length(each, context_length)
    return [tokenizer.encode(each, add_special_tokens=True) for each in texts], isinstance(text, list)


def _spread(body: Mapping[str, Any], name: str, kind: type, size: int, default: Any) -> list[Any]:
    """Return a field of one value for all prompts, or of a list of one for each, as a list."""
    values = [default if each is None else each for each in one_each(body.get(name), size, name)]
    if not all(type(each) is kind for each in values):
        raise RequestError(f"{name} must be {_KINDS[kind]}, or a list of such")
    return values


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

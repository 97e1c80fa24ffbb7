"""``/v1/completions``: bodies to jobs, completions to replies."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.base.sglang_wire import (
    RequestError,
    check_id_length,
    check_num_responses,
    check_prompt_length,
    check_text_length,
    new_request_id,
)
from rollfeed.engine.server.parsing import make_jobs, parse_sampling, token_array
from rollfeed.engine.server.service import ServerJob
from rollfeed.protocols import Tokenizer
from rollfeed.types import Completion

_DEFAULT_COMPLETION_TOKENS = 16
_SAME_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "ignore_eos", "repetition_penalty"),
    *("frequency_penalty", "presence_penalty", "logit_bias", "skip_special_tokens", "no_stop_trim", "regex", "ebnf"),
)
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "echo": (None, False),
    "response_format": (None, {"type": "text"}),
}
"""What this server does not do, with the values that ask for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionsCall:
    """A whole call."""

    call_id: str
    created: int
    model: str
    jobs: Sequence[ServerJob]
    num_prompts: int
    stream: bool
    include_usage: bool
    with_logprobs: bool

    def envelope(self) -> dict[str, Any]:
        """Return what every reply and chunk of the call carries."""
        return {"id": self.call_id, "object": "text_completion", "created": self.created, "model": self.model}


def parse_call(
    body: Mapping[str, Any], *, tokenizer: Tokenizer, context_length: int, most_jobs: int
) -> CompletionsCall:
    """Return the jobs of a body. Raises RequestError if it cannot be served."""
    for name, neutral in _REFUSED.items():
        if body.get(name) not in neutral:
            raise RequestError(f"{name} is not supported by this server")
    prompts = _prompts(body, tokenizer, context_length=context_length, most=most_jobs)
    call_id = body.get("rid") if isinstance(body.get("rid"), str) else None
    check_id_length(call_id or "")
    call_id = call_id or f"cmpl-{new_request_id()}"
    jobs: list[ServerJob] = []
    for index, prompt_ids in enumerate(prompts):
        check_prompt_length(len(prompt_ids), context_length)
        room = context_length - len(prompt_ids)
        sampling = parse_sampling(
            _sampling_params(body, room), prompt_tokens=len(prompt_ids), context_length=context_length
        )
        check_num_responses(len(jobs) + sampling.num_samples, most_jobs)
        rid = call_id if len(prompts) == 1 else f"{call_id}_{index}"
        jobs += make_jobs(prompt_ids, sampling, rid=rid, return_logprob=True)
    stream_options = body.get("stream_options")
    return CompletionsCall(
        call_id=call_id,
        created=int(time.time()),
        model=str(body.get("model") or ""),
        jobs=jobs,
        num_prompts=len(prompts),
        stream=body.get("stream") is True,
        include_usage=isinstance(stream_options, dict) and stream_options.get("include_usage") is True,
        with_logprobs=body.get("logprobs") is not None and body["logprobs"] is not False,
    )


def whole_reply(call: CompletionsCall, completions: Sequence[Completion], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the reply to a call that is not streamed."""
    choices = []
    for index, completion in enumerate(completions):
        choices.append(
            {
                "index": index,
                "text": completion.text,
                "logprobs": logprobs_of(call, completion.token_ids, completion.logprobs, tokenizer),
                "finish_reason": completion.finish_reason.kind.value,
                "matched_stop": completion.finish_reason.matched,
            }
        )
    return {**call.envelope(), "choices": choices, "usage": usage_of(call, completions)}


def chunk(
    call: CompletionsCall, index: int, text: str, *, logprobs: Any = None, completion: Completion | None = None
) -> dict[str, Any]:
    """Return one piece of a streamed reply; the last one of a choice carries its ``completion``."""
    choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
    if completion is not None:
        choice["finish_reason"] = completion.finish_reason.kind.value
        choice["matched_stop"] = completion.finish_reason.matched
    return {**call.envelope(), "choices": [choice]}


def usage_of(call: CompletionsCall, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return token counts of a call, each prompt counted once."""
    samples = len(completions) // call.num_prompts
    prompt_tokens = sum(completion.prompt_tokens for completion in completions[::samples])
    completion_tokens = sum(len(completion.token_ids) for completion in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(completion.cached_tokens for completion in completions)},
    }


def logprobs_of(
    call: CompletionsCall, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32], tokenizer: Tokenizer
) -> dict[str, Any] | None:
    """Return the log-probabilities of tokens in the form of the endpoint, if they were asked for."""
    if not call.with_logprobs:
        return None
    tokens = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in token_ids.tolist()]
    offsets = [0, *np.cumsum([len(token) for token in tokens]).tolist()][: len(tokens)]
    return {"tokens": tokens, "token_logprobs": logprobs.tolist(), "top_logprobs": None, "text_offset": offsets}


def _sampling_params(body: Mapping[str, Any], room: int) -> dict[str, Any]:
    given = {name: body[name] for name in _SAME_NAME if body.get(name) is not None}
    limit = body.get("max_completion_tokens")
    limit = body.get("max_tokens") if limit is None else limit
    if limit is None:
        limit = min(_DEFAULT_COMPLETION_TOKENS, room)
    given["max_new_tokens"] = limit
    if body.get("min_tokens") is not None:
        given["min_new_tokens"] = body["min_tokens"]
    if body.get("seed") is not None:
        given["sampling_seed"] = body["seed"]
    return given


def _prompts(
    body: Mapping[str, Any], tokenizer: Tokenizer, *, context_length: int, most: int
) -> list[NDArray[np.int32]]:
    prompt = body.get("prompt")
    prompt = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("prompt must be a string, a list of strings, or token ids")
    if isinstance(prompt[0], str | list):
        check_num_responses(len(prompt), most)
    if all(isinstance(each, str) for each in prompt):
        for each in prompt:
            check_text_length(each, context_length)
        return [tokenizer.encode(each, add_special_tokens=True) for each in prompt]
    if isinstance(prompt[0], list):
        return [token_array(each, name="prompt") for each in prompt]
    return [token_array(prompt, name="prompt")]

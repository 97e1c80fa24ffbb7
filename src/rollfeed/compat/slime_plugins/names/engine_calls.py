"""``post`` and ``get`` of slime's plug-ins.

What goes to the engine's address is answered by the run's engine, whichever that is; anything else goes over HTTP.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from numpy.typing import NDArray

from rollfeed.compat.slime_plugins.shared_run import CURRENT, Sent, SlimeUseError, Work
from rollfeed.seeds import derive_seed
from rollfeed.types import (
    Completion,
    CompletionTimings,
    FinishKind,
    FinishReason,
    Picture,
    SamplingParams,
)

_PARAMS = {each.name for each in fields(SamplingParams)} - {"seed", "return_sampling_mask", "return_routed_experts"}
_WITHOUT_EFFECT = {"custom_params": None, "n": 1, "ignore_eos": False, "sampling_seed": None}
"""Keys of ``sampling_params`` that may be there with that value, or are read elsewhere."""
_TIMEOUT_SECONDS = 120.0
_RETRY_STATUS = (408, 429)


async def post(
    url: str,
    payload: Mapping[str, Any] | None = None,
    max_retries: int = 60,
    action: str = "post",
    headers: Mapping[str, str] | None = None,
    use_http2: bool = False,
) -> Any:
    """Return the JSON of a reply, or its text.

    Connection errors and the statuses 408, 429 and 5xx are tried again, at most ``max_retries`` tries in all.

    Raises:
        SlimeUseError: If the engine is asked for something that it does not do, or the server refuses.
    """
    del use_http2
    work = CURRENT.get()
    if work is not None and is_engine(url, work):
        return await _ask_engine(urlsplit(url).path, payload or {}, work)
    return await _send(action, url, payload, max_retries=max_retries, headers=headers)


async def get(url: str, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """Return the JSON of a reply, as :func:`post`."""
    return await post(url, max_retries=max_retries, action="get", headers=headers)


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """Return the address of a model; that of the policy where there is no other."""
    routers = args.sglang_model_routers or {}
    host, port = routers.get(model_name, (args.sglang_router_ip, args.sglang_router_port))
    return f"http://{host}:{port}{endpoint}"


def is_engine(url: str, work: Work) -> bool:
    """Whether an address is that of the policy's engine."""
    parts, args = urlsplit(url), work.run.args
    return (parts.hostname, parts.port or 80) == (args.sglang_router_ip, int(args.sglang_router_port))


async def _ask_engine(path: str, payload: Mapping[str, Any], work: Work) -> Any:
    match path.rstrip("/"):
        case "/generate":
            return reply(
                await work.on_loop(ask(payload, work)),
                with_logprobs=bool(payload.get("return_logprob")),
                with_experts=bool(payload.get("return_routed_experts")),
            )
        case "/workers":
            args = work.run.args
            return {"workers": [{"id": "engine", "url": f"http://{args.sglang_router_ip}:{args.sglang_router_port}"}]}
        case "/list_workers":
            return {"urls": [f"http://{work.run.args.sglang_router_ip}:{work.run.args.sglang_router_port}"]}
        case "/abort_request":
            return {"success": True}  # the end of a step aborts what runs
        case "/health" | "/health_generate":
            return {}
        case other:
            raise SlimeUseError(f"{other}: the engine is asked through /generate here, and nothing else")


async def ask(payload: Mapping[str, Any], work: Work) -> Completion:
    """Have the engine answer a payload of ``/generate``, and note what was sent and said."""
    ids = _input_ids(payload, work)
    params = _params(payload.get("sampling_params") or {}, work, ids)
    if params.max_new_tokens == 0:
        return _nothing(len(ids))
    request, number = work.request, work.num_asked
    work.num_asked += 1
    if request is None:
        name = f"step{work.step}-asked{number}"
    else:
        turn = f"-turn{number}" if number else ""
        name = f"step{request.step}{turn}-rollout{request.rollout_id}"
    given = payload.get("image_data") or ()
    shown = [given] if isinstance(given, str) else list(given)
    ids, images = await asyncio.to_thread(_with_pictures, ids, shown, work) if shown else (ids, ())
    completion = await work.services.endpoint.generate(ids, params, request_id=name, images=images)
    work.sent.append(Sent(ids, completion))
    return completion


def _with_pictures(
    ids: NDArray[np.int32], given: Sequence[Any], work: Work
) -> tuple[NDArray[np.int32], tuple[Picture, ...]]:
    """Return a prompt with the tokens of its pictures, unless it has them, and the pictures."""
    seeing = work.services.picture_input
    if seeing is None or seeing.pictures is None:
        raise SlimeUseError("/generate: image_data is there, and the model takes text only")
    try:
        images = tuple(each if isinstance(each, Picture) else seeing.loader.load(each) for each in given)
        try:
            seeing.pictures.locate(ids, images)
        except ValueError:
            ids = seeing.pictures.expand(ids, images, is_prompt=False)
    except ValueError as error:
        raise SlimeUseError(f"/generate: image_data: {error}") from None
    return ids, images


def _input_ids(payload: Mapping[str, Any], work: Work) -> NDArray[np.int32]:
    ids = payload.get("input_ids")
    if ids is None:
        text = payload.get("text")
        if not isinstance(text, str):
            raise SlimeUseError("/generate: give input_ids, a list of token ids, or text")
        request = work.request
        if request is not None and text == request.prompt.text:
            return request.prompt.token_ids
        return work.services.tokenizer.encode(text, add_special_tokens=False)
    array = np.asarray(ids)
    if array.ndim != 1 or not len(array) or not np.issubdtype(array.dtype, np.integer):
        raise SlimeUseError(f"/generate: input_ids are {ids!r:.80}; give a list of token ids, one prompt a request")
    return array.astype(np.int32)


def _params(given: Mapping[str, Any], work: Work, ids: NDArray[np.int32]) -> SamplingParams:
    """Return the parameters of a request: the run's, changed by what the payload says, within the context."""
    request = work.request
    params = changed_params(
        request.params if request is not None else default_params(work.run.args, work.run.params), given
    )
    if request is not None:
        params = replace(
            params, max_new_tokens=max(0, min(params.max_new_tokens, request.max_context_length - len(ids)))
        )
    params = replace(params, min_new_tokens=min(params.min_new_tokens, params.max_new_tokens))
    return replace(params, seed=_seed(given, params, work, ids))


def changed_params(base: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """Return parameters with what slime's ``sampling_params`` say. Raises SlimeUseError if they cannot be so."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key in _PARAMS and value is not None:
            values[key] = tuple([value] if isinstance(value, str) else value) if key.startswith("stop") else value
        elif key in _WITHOUT_EFFECT and (value is None or key in ("custom_params", "sampling_seed")):
            continue
        elif value is not None and value != _WITHOUT_EFFECT.get(key, value is None):
            raise SlimeUseError(f"sampling_params[{key!r}] = {value!r:.40}: the engine is not asked that way here")
    try:
        return replace(base, **values)
    except (TypeError, ValueError) as error:
        raise SlimeUseError(f"sampling_params: {error}") from None


def _seed(given: Mapping[str, Any], params: SamplingParams, work: Work, ids: NDArray[np.int32]) -> int | None:
    if (seed := given.get("sampling_seed")) is not None:
        return int(seed)
    request = work.request
    if request is None:
        return derive_seed(work.run.args.rollout_seed, "slime", work.step, work.num_asked)
    # The first request of an answering is seeded as the built-in generate function seeds it.
    behind = len(ids) - len(request.prompt.token_ids)
    number = work.num_asked
    return params.seed if params.seed is None or not number else derive_seed(params.seed, "turn", number, behind)


def default_params(args: Any, params: SamplingParams) -> SamplingParams:
    """Return ``params``, the run's, with what arguments say: those of the run, or of a changed copy."""
    return replace(
        params,
        max_new_tokens=args.rollout_max_response_len,
        temperature=args.rollout_temperature,
        top_p=args.rollout_top_p,
        top_k=args.rollout_top_k,
        stop=tuple(args.rollout_stop or ()),
        stop_token_ids=tuple(args.rollout_stop_token_ids or ()),
        skip_special_tokens=args.rollout_skip_special_tokens,
    )


def sampling_params(params: SamplingParams) -> dict[str, Any]:
    """Return parameters as slime's functions are handed them, to be changed as they like."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_new_tokens": params.max_new_tokens,
        "min_new_tokens": params.min_new_tokens,
        "repetition_penalty": params.repetition_penalty,
        "stop": list(params.stop) or None,
        "stop_token_ids": list(params.stop_token_ids) or None,
        "skip_special_tokens": params.skip_special_tokens,
        "no_stop_trim": params.no_stop_trim,
        "spaces_between_special_tokens": params.spaces_between_special_tokens,
    }


def reply(completion: Completion, *, with_logprobs: bool = True, with_experts: bool = False) -> dict[str, Any]:
    """Return a completion as ``/generate`` answers."""
    reason, ids = completion.finish_reason, completion.token_ids.tolist()
    finish: dict[str, Any] = {"type": reason.kind.value}
    if reason.matched is not None:
        finish["matched"] = reason.matched
    meta: dict[str, Any] = {
        "finish_reason": finish,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(ids),
        "cached_tokens": completion.cached_tokens,
        "e2e_latency": completion.timings.total_seconds,
    }
    if completion.version_spans:
        meta["weight_version"] = str(completion.version_spans[-1].policy_version)
    if with_logprobs:
        meta["output_token_logprobs"] = [
            [value, token, None] for value, token in zip(completion.logprobs.tolist(), ids, strict=True)
        ]
    if with_experts and completion.routed_experts is not None:
        experts = completion.routed_experts.numbers.astype("<i4")
        meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
    return {"text": completion.text, "output_ids": ids, "meta_info": meta}


def _nothing(num_prompt_tokens: int) -> Completion:
    """Return the answer to a request that has no room for a token."""
    return Completion(
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        text="",
        finish_reason=FinishReason(FinishKind.LENGTH),
        version_spans=(),
        precision="",
        prompt_tokens=num_prompt_tokens,
        cached_tokens=0,
        timings=CompletionTimings(0.0, 0.0),
    )


async def _send(
    action: str, url: str, payload: Mapping[str, Any] | None, *, max_retries: int, headers: Mapping[str, str] | None
) -> Any:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for tried in range(1, max(1, max_retries) + 1):
            problem = ""
            try:
                async with session.request(action, url, json=payload, headers=headers) as answer:
                    if answer.status < 400:
                        is_json = "json" in answer.content_type
                        return await answer.json() if is_json else await answer.text()
                    problem = f"HTTP {answer.status}: {(await answer.text())[:200]}"
                    if answer.status < 500 and answer.status not in _RETRY_STATUS:
                        raise SlimeUseError(f"{url}: {problem}")
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}"
            if tried >= max_retries:
                raise SlimeUseError(f"{url}: {problem}, after {tried} tries")
            await asyncio.sleep(min(30.0, 0.1 * 2**tried))

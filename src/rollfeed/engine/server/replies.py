"""From completions to the JSON of ``/generate``, in SGLang's structure."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.base.sglang_wire import ABORTED
from rollfeed.engine.server.service import RunningJob, WeightVersions
from rollfeed.protocols import Tokenizer
from rollfeed.types import FinishKind, FinishReason, SamplingParams
from rollfeed.types.text import held_back

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def generate_reply(answer: RunningJob, *, weight_version: str, versions: WeightVersions) -> dict[str, Any]:
    """Return the object of one ended response.

    A response without tokens has ``weight_version``, the version served now.
    """
    completion = answer.completion
    reason = finish_reason(completion.finish_reason, len(completion.token_ids))
    spans = [
        {"version": versions.name(span.policy_version), "start": span.start, "end": span.end}
        for span in completion.version_spans
    ] or [{"version": weight_version, "start": 0, "end": 0}]
    meta = _meta(
        answer,
        reason,
        weight_version=str(spans[-1]["version"]),
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        cached_tokens=completion.cached_tokens,
    )
    meta["weight_versions"] = spans
    if completion.seen_pictures:
        meta["pictures"] = [each._asdict() for each in completion.seen_pictures]
    if (mask := completion.sampling_mask) is not None and len(completion.token_ids):
        meta["output_token_sampling_mask"] = [each.tolist() for each in mask.split()]
        meta["output_token_sampling_logprobs"] = completion.logprobs.tolist()
        meta["output_token_sampling_mask_length"] = len(completion.token_ids)
    if (routed := completion.routed_experts) is not None:
        meta["routed_experts"] = base64.b64encode(routed.numbers.astype("<i4").tobytes()).decode()
    if completion.finish_reason.kind is not FinishKind.ABORT:
        meta["response_sent_to_client_ts"] = time.time()
    return {"text": completion.text, "output_ids": completion.token_ids.tolist(), "meta_info": meta}


def partial_reply(answer: RunningJob, *, weight_version: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the object of a response that goes on, with everything so far."""
    request = answer.request
    num_tokens = request.num_published
    token_ids, logprobs = request.token_ids[:num_tokens], request.logprobs[:num_tokens]
    meta = _meta(
        answer,
        None,
        weight_version=weight_version,
        token_ids=token_ids,
        logprobs=logprobs,
        cached_tokens=request.cached_tokens,
    )
    text = settled_text(token_ids, answer.job.params, tokenizer)
    return {"text": text, "output_ids": token_ids.tolist(), "meta_info": meta}


def settled_text(token_ids: NDArray[np.int32], params: SamplingParams, tokenizer: Tokenizer) -> str:
    """Return the text of the first tokens of a response, as far as what follows cannot change it.

    A character of which bytes are missing, and what may be the beginning of a stop string that will
    be left out, are held back.
    """
    if not len(token_ids):
        return ""
    text = tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens).rstrip(_REPLACEMENT)
    if params.no_stop_trim:
        return text
    return text[: len(text) - max((held_back(text, stop) for stop in params.stop), default=0)]


def finish_reason(reason: FinishReason, num_tokens: int) -> dict[str, Any]:
    """Return the object that says why a response ended."""
    if reason.kind is FinishKind.STOP:
        return {"type": "stop", "matched": reason.matched}
    if reason.kind is FinishKind.LENGTH:
        return {"type": "length", "length": num_tokens}
    return ABORTED


def _meta(
    answer: RunningJob,
    reason: dict[str, Any] | None,
    *,
    weight_version: str,
    token_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    cached_tokens: int,
) -> dict[str, Any]:
    job = answer.job
    meta: dict[str, Any] = {
        "id": job.request_id,
        "finish_reason": reason,
        "prompt_tokens": len(job.token_ids),
        "weight_version": weight_version,
        "num_retractions": answer.request.num_retractions,
    }
    # A response of no tokens whose prompt is not scored comes without arrays.
    if job.return_logprob and (len(token_ids) or job.score_from is not None):
        meta["input_token_logprobs"] = _input_logprobs(answer)
        pairs = zip(logprobs.tolist(), token_ids.tolist(), strict=True)
        meta["output_token_logprobs"] = [[logprob, token_id, None] for logprob, token_id in pairs]
        meta["output_token_logprobs_length"] = len(token_ids)
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": len(token_ids),
        "cached_tokens": cached_tokens,
        "cached_tokens_details": {"device": cached_tokens, "host": 0} if cached_tokens else None,
        "dp_rank": None,
        "e2e_latency": answer.seconds,
    }
    return meta


def _input_logprobs(answer: RunningJob) -> list[list[Any]]:
    start = answer.job.score_from
    if start is None:
        return []
    logprobs: Sequence[float] = answer.request.prompt_logprobs[start:].tolist()
    token_ids = answer.job.token_ids[start:].tolist()
    # Nothing stands before the first token to predict it; an aborted one may not have been scored.
    return [[None if np.isnan(p) else p, token_id, None] for p, token_id in zip(logprobs, token_ids, strict=True)]

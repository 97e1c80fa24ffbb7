"""From the JSON of ``/generate`` to jobs and back."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollfeed.base.sglang_wire import (
    RequestError,
    Usage,
    check_prompt_length,
    checked_new_tokens,
    one_each,
    request_ids,
    sample_id,
)
from rollfeed.testing.fake_sglang.settings import FaultKind, Lie, ServerFault
from rollfeed.testing.fake_sglang.tokens import Output, Part

_NOTHING = Output((), (), (), 0)
_BYTES_PER_TOKEN = 4
"""What a token of a prompt given as text is taken to be."""
_DEPTH = 50_000
_UNKNOWN_ID = 2**31 - 1
_MANY = 400
"""Times all tokens of a reply that is too long."""


@dataclass(slots=True, kw_only=True, eq=False)
class FakeJob:
    """One sample to be made, and what has become of it."""

    rid: str
    prompt: bytes
    """JSON: a list of ids, or a string."""
    prompt_tokens: int
    max_new_tokens: int
    sample_key: str | int
    """What tells samples of a prompt apart: the sampling seed, else the request id."""
    ignore_eos: bool
    return_logprob: bool
    scores_from: int | None
    """First prompt token whose log-probability is wanted."""
    on_end: Callable[[FakeJob], object]
    on_progress: Callable[[FakeJob], object] | None = None
    arrived: float = 0.0
    output: Output = _NOTHING
    finish_reason: dict[str, Any] | None = None
    """None while it is being made."""
    cached_tokens: int = 0
    num_retractions: int = 0
    return_routed_experts: bool = False
    weight_version: str = "default"
    """In force when the reply is made."""
    versions: list[tuple[int, str]] = field(default_factory=list)
    """From which of its tokens on which version was in force; empty where the server does not tell."""
    status: int = 200
    error: str = ""

    def prompt_ids(self) -> NDArray[np.int32]:
        """Return the ids of the prompt; of a text, its bytes."""
        if self.prompt.startswith(b"["):
            return np.array(msgspec.json.decode(self.prompt, type=list[int]), np.int32)
        return np.frombuffer(self.prompt, np.uint8).astype(np.int32)

    def note_version(self, num_tokens: int, version: str) -> None:
        """Count the tokens after the first so many to another version."""
        if not self.versions or self.versions[-1][1] == version:
            return
        if num_tokens <= self.versions[-1][0]:
            self.versions.pop()
        self.versions.append((num_tokens if self.versions else 0, version))

    def weight_versions(self) -> list[dict[str, Any]]:
        """Return which of the tokens made so far saw which version."""
        num_tokens = self.output.num_tokens
        kept = [(start, version) for start, version in self.versions if start < num_tokens or start == 0]
        ends = [*(start for start, _ in kept[1:]), num_tokens][: len(kept)]
        return [
            {"version": version, "start": start, "end": end} for (start, version), end in zip(kept, ends, strict=True)
        ]

    def end(self, output: Output, finish_reason: dict[str, Any] | None) -> None:
        """Say what was made and why no more comes."""
        self.output, self.finish_reason = output, finish_reason
        # Who is told refers to the job: without circles both go at once.
        on_end, self.on_end, self.on_progress = self.on_end, _nobody, None
        on_end(self)


class FakeBackend(Protocol):
    """Makes responses."""

    def submit(self, job: FakeJob) -> None:
        """Begin a job; its ``on_end`` is called once, perhaps before this returns."""

    def abort(self, concerned: Callable[[FakeJob], bool]) -> int:
        """End those jobs with what they have, and return how many there were."""

    def pause(self, mode: str) -> None:
        """Make nothing more; ``abort`` ends what runs, ``retract`` puts it back, ``in_place`` leaves it."""

    def resume(self) -> None:
        """Go on."""

    def stall(self, seconds: float) -> None:
        """Make nothing for a while."""

    def flush(self) -> None:
        """Forget cached prompts."""

    def progress(self) -> Sequence[tuple[FakeJob, int]]:
        """Return the jobs that have not ended, and how many tokens each has."""

    def usage(self) -> Usage:
        """Return how busy it is."""


class _Sampling(msgspec.Struct):
    max_new_tokens: int | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    sampling_seed: int | None = None


class _GenerateBody(msgspec.Struct):
    input_ids: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    sampling_params: _Sampling | list[_Sampling] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    return_routed_experts: bool | None = None
    stream: bool | None = None


_decoder = msgspec.json.Decoder(_GenerateBody)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(slots=True, kw_only=True)
class FakeCall:
    """A whole ``/generate`` call."""

    is_single: bool
    """Whether the reply is one object instead of a list."""
    stream: bool
    jobs: list[FakeJob] = field(default_factory=list)


def parse_generate(
    body: bytes, *, context_length: int, default_max_new_tokens: int, on_end: Callable[[FakeJob], object]
) -> FakeCall:
    """Return the jobs of a body. Raises RequestError if it cannot be served."""
    try:
        parsed = _decoder.decode(body)
        prompts, is_batch = _prompts(parsed)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not what /generate takes: {error}") from None
    size = len(prompts)
    samplings = one_each(parsed.sampling_params or _Sampling(), size, "sampling_params")
    logprobs = one_each(parsed.return_logprob or False, size, "return_logprob")
    starts = one_each(-1 if parsed.logprob_start_len is None else parsed.logprob_start_len, size, "logprob_start_len")
    rids = request_ids(parsed.rid, size)
    call = FakeCall(is_single=not is_batch and (samplings[0].n or 1) == 1, stream=bool(parsed.stream))
    for prompt, sampling, rid, logprob, start in zip(prompts, samplings, rids, logprobs, starts, strict=True):
        num_prompt, num_samples = _num_tokens(prompt), 1 if sampling.n is None else sampling.n
        check_prompt_length(num_prompt, context_length)
        max_new_tokens = checked_new_tokens(
            sampling.max_new_tokens,
            prompt_tokens=num_prompt,
            context_length=context_length,
            default=default_max_new_tokens,
        )
        if num_samples < 1:
            raise RequestError(f"n must be at least 1, got {num_samples}.")
        for index in range(num_samples):
            sample_rid = rid if num_samples == 1 else sample_id(rid, index)
            seed = sampling.sampling_seed
            call.jobs.append(
                FakeJob(
                    rid=sample_rid,
                    prompt=prompt,
                    prompt_tokens=num_prompt,
                    max_new_tokens=max_new_tokens,
                    sample_key=sample_rid if seed is None else seed + index,
                    ignore_eos=bool(sampling.ignore_eos),
                    return_logprob=logprob,
                    scores_from=start if logprob and start >= 0 else None,
                    return_routed_experts=bool(parsed.return_routed_experts),
                    on_end=on_end,
                )
            )
    return call


def reply_parts(job: FakeJob, *, seconds: float, sent: float, index: int | None = None) -> list[Part]:
    """Return the JSON object of one response, in pieces.

    A job without a finish reason goes on. ``index`` tells several responses of a stream apart.
    """
    output = job.output
    spans = job.weight_versions() if job.finish_reason is not None else []
    meta = {
        "id": job.rid,
        "finish_reason": job.finish_reason,
        "prompt_tokens": job.prompt_tokens,
        "weight_version": spans[-1]["version"] if spans else job.weight_version,
        "num_retractions": job.num_retractions,
    }
    rest = {
        "reasoning_tokens": 0,
        "completion_tokens": output.num_tokens,
        "cached_tokens": job.cached_tokens,
        **({"weight_versions": spans} if spans else {}),
        "cached_tokens_details": {"device": job.cached_tokens, "host": 0} if job.cached_tokens else None,
        "dp_rank": None,
        "e2e_latency": seconds,
    }
    if job.finish_reason is not None and job.finish_reason.get("type") != "abort":
        rest["response_sent_to_client_ts"] = sent
    parts: list[Part] = [b'{"text":"', *output.text, b'","output_ids":[', *output.ids, b'],"meta_info":']
    parts.append(msgspec.json.encode(meta)[:-1])
    # A response of no tokens whose prompt is not scored comes without arrays.
    if job.return_logprob and (output.num_tokens or job.scores_from is not None):
        parts += [b',"input_token_logprobs":', _input_logprobs(job), b',"output_token_logprobs":[', *output.triples]
        parts.append(b'],"output_token_logprobs_length":%d' % output.num_tokens)
    if job.return_routed_experts and output.num_tokens:
        # Of two layers with eight experts each, two a token.
        count = 4 * (job.prompt_tokens + output.num_tokens - 1)
        numbers = b"".join(bytes([each % 8, 0, 0, 0]) for each in range(count))
        parts.append(b',"routed_experts":' + msgspec.json.encode(numbers))
    parts += [b",", msgspec.json.encode(rest)[1:]]
    parts.append(b"}" if index is None else b',"index":%d}' % index)
    return parts


def joined_replies(replies: Sequence[Sequence[Part]]) -> list[Part]:
    """Return a JSON list of replies, in pieces."""
    parts: list[Part] = [b"["]
    for reply in replies:
        parts += [*reply, b","]
    parts[-1] = b"]"
    return parts


def spoilt(parts: Sequence[Part], fault: ServerFault) -> list[Part]:
    """Return a reply as a fault leaves it."""
    body = b"".join(parts)
    if fault.kind is FaultKind.TRUNCATED_JSON:
        return [body[: int(len(body) * fault.fraction)]]
    if fault.lie is Lie.DEEP_JSON:
        return [body[:-1], b',"rest":', b"[" * _DEPTH, b"]" * _DEPTH, b"}"]
    if fault.lie is Lie.NAN_LOGPROB:
        return [body.replace(b'"output_token_logprobs":[[', b'"output_token_logprobs":[[NaN', 1)]
    if fault.kind not in (FaultKind.WRONG_LOGPROB_COUNT, FaultKind.MISSING_FINISH_REASON, FaultKind.LIE):
        return [body]
    content = msgspec.json.decode(body)
    for reply in content if isinstance(content, list) else [content]:
        meta = reply["meta_info"]
        if fault.lie is not None:
            _tell(fault.lie, reply, meta)
        elif fault.kind is FaultKind.MISSING_FINISH_REASON:
            del meta["finish_reason"]
        elif meta.get("output_token_logprobs"):
            meta["output_token_logprobs"].pop()
    return [msgspec.json.encode(content)]


def raw_lie(lie: Lie) -> list[Part] | None:
    """Return what is sent in place of a whole HTTP reply, if a lie is about that; the connection stays open."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    match lie:
        case Lie.ENDLESS_BODY:
            spaces = b" " * (1 << 16)
            return [head, b"transfer-encoding: chunked\r\n\r\n", *(b"10000\r\n", spaces, b"\r\n") * 1024]
        case Lie.LONG_BODY:
            return [head, b"content-length: 2147483648\r\n\r\n{"]
        case Lie.PROVISIONAL_REPLIES:
            return [b"HTTP/1.1 100 Continue\r\n\r\n" * 400]
        case Lie.COMPRESSED_BODY:
            body = _compressed_zeros()
            return [head, b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(body), body]
    return None


@functools.cache
def _compressed_zeros() -> bytes:
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)  # as gzip does
    return b"".join(map(packer.compress, [bytes(1 << 20)] * 64)) + packer.flush()


def _tell(lie: Lie, reply: dict[str, Any], meta: dict[str, Any]) -> None:
    """Make a reply a lie; one without tokens stays as it is."""
    ids, triples = reply["output_ids"], meta.get("output_token_logprobs")
    if not triples:
        return
    match lie:
        case Lie.OTHER_TEXT:
            reply["text"] = "the answer of somebody else"
        case Lie.NO_TEXT:
            del reply["text"]
        case Lie.POSITIVE_LOGPROB:
            triples[-1][0] = 0.7
        case Lie.LOW_LOGPROB:
            triples[-1][0] = -1e30
        case Lie.NO_LOGPROB:
            triples[-1][0] = None
        case Lie.OTHER_IDS:
            triples[0][1] += 1
        case Lie.UNKNOWN_ID | Lie.NEGATIVE_ID:
            ids[0] = triples[0][1] = -5 if lie is Lie.NEGATIVE_ID else _UNKNOWN_ID
        case Lie.NESTED_IDS:
            reply["output_ids"] = [ids]
        case Lie.PROMPT_TOKENS:
            meta["prompt_tokens"] += 1
        case Lie.OTHER_REQUEST:
            meta["id"] = f"another-{meta['id'][::-1]}"
        case Lie.NEW_VERSION:
            meta["weight_version"] = "999"
            meta["weight_versions"] = [{"version": "999", "start": 0, "end": len(ids)}]
        case Lie.SHORT | Lie.EMPTY_STOP | Lie.LONG:
            _cut(reply, meta, lie)
        case Lie.UNMATCHED_STOP:
            meta["finish_reason"] = {"type": "stop", "matched": "<nowhere>"}


def _cut(reply: dict[str, Any], meta: dict[str, Any], lie: Lie) -> None:
    times, kept = (_MANY, None) if lie is Lie.LONG else (1, 0 if lie is Lie.EMPTY_STOP else 1)
    reply["output_ids"] = ids = (reply["output_ids"] * times)[:kept]
    meta["output_token_logprobs"] = (meta["output_token_logprobs"] * times)[:kept]
    meta["completion_tokens"] = meta["output_token_logprobs_length"] = len(ids)
    meta["finish_reason"] = {"type": "stop"} if lie is Lie.EMPTY_STOP else {"type": "length", "length": len(ids)}
    meta.pop("weight_versions", None)


def _nobody(_: FakeJob) -> None:
    return


def _input_logprobs(job: FakeJob) -> bytes:
    if job.scores_from is None:
        return b"[]"
    token_ids = job.prompt_ids()[job.scores_from :].tolist()
    # Nothing stands before the first token to predict it.
    scores = [
        [None if job.scores_from + index == 0 else -(1.0 + token % 97) / 16, token, None]
        for index, token in enumerate(token_ids)
    ]
    return msgspec.json.encode(scores)


def _prompts(body: _GenerateBody) -> tuple[list[bytes], bool]:
    ids, text = bytes(body.input_ids).strip(), bytes(body.text).strip()
    ids, text = (b"" if each == b"null" else each for each in (ids, text))
    if bool(ids) == bool(text):
        raise RequestError("Either text or input_ids should be provided, and not both.")
    if ids:
        if not ids.startswith(b"["):
            raise RequestError("input_ids must be a list of integers, or a list of such lists")
        if not ids[1:].lstrip().startswith(b"["):
            return [ids], False
        return [bytes(each) for each in _list_decoder.decode(ids)], True
    if text.startswith(b"["):
        return [bytes(each) for each in _list_decoder.decode(text)], True
    return [text], False


def _num_tokens(prompt: bytes) -> int:
    if not prompt.startswith(b"["):
        return max(1, (len(prompt) - 2) // _BYTES_PER_TOKEN) if len(prompt) > 2 else 0
    return prompt.count(b",") + 1 if len(prompt) > 2 and prompt[1:-1].strip() else 0

"""From the JSON of ``/generate`` to jobs and back."""

from __future__ import annotations

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
from rollfeed.testing.fake_sglang.settings import FaultKind, ServerFault
from rollfeed.testing.fake_sglang.tokens import Output, Part

_NOTHING = Output((), (), (), 0)
_BYTES_PER_TOKEN = 4
"""What a token of a prompt given as text is taken to be."""


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
    if fault.kind not in (FaultKind.WRONG_LOGPROB_COUNT, FaultKind.MISSING_FINISH_REASON):
        return [body]
    content = msgspec.json.decode(body)
    for reply in content if isinstance(content, list) else [content]:
        meta = reply["meta_info"]
        if fault.kind is FaultKind.MISSING_FINISH_REASON:
            del meta["finish_reason"]
        elif meta.get("output_token_logprobs"):
            meta["output_token_logprobs"].pop()
    return [msgspec.json.encode(content)]


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

"""The processor time of reading replies: whole ones as SGLang sends them, and streams of one event a token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from rollfeed.engine.dialects.sglang.replies import SGLangAnswer
from rollfeed.engine.dialects.vllm.replies import VLLMAnswer
from rollfeed.engine.http.incoming import Incoming
from rollfeed.testing import CharTokenizer
from rollfeed.testing.fake_sglang.tokens import Response
from rollfeed.testing.fake_sglang.wire import FakeJob, reply_parts

_NUM_TOKENS = 2_000
_PIECE_BYTES = 1 << 16
_MOST_BYTES = 1 << 24
_REPETITIONS = 50
_PROMPT_IDS = np.zeros(10, np.int32)


def reply_microseconds_per_token() -> dict[str, float]:
    """Return what a token costs from the bytes of HTTP to arrays: ``whole`` and ``streamed``, of 2,000 tokens each."""
    body, events = _whole(), _events()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
    whole = head % (b"application/json", len(body)) + body
    pieces = [whole[start : start + _PIECE_BYTES] for start in range(0, len(whole), _PIECE_BYTES)]
    stream = [head % (b"text/event-stream", sum(map(len, events))), *events]
    return {"whole": _measured(lambda: _read_whole(pieces)), "streamed": _measured(lambda: _read_stream(stream))}


def _measured(read: Callable[[], int]) -> float:
    assert read() == _NUM_TOKENS
    began = time.thread_time()
    for _ in range(_REPETITIONS):
        read()
    return 1e6 * (time.thread_time() - began) / (_REPETITIONS * _NUM_TOKENS)


def _read_whole(pieces: Sequence[bytes]) -> int:
    answer = SGLangAnswer(max_new_tokens=_NUM_TOKENS, with_mask=False)
    incoming = Incoming(most_bytes=_MOST_BYTES, events=None)
    for piece in pieces:
        incoming.feed(memoryview(piece))
    answer.take(incoming.reply().content or b"")
    return len(answer.reply().token_ids)


def _read_stream(pieces: Sequence[bytes]) -> int:
    answer = VLLMAnswer(prompt_ids=_PROMPT_IDS, max_new_tokens=_NUM_TOKENS, exact=True, tokenizer=CharTokenizer())
    incoming = Incoming(most_bytes=_MOST_BYTES, events=answer.take)
    for piece in pieces:
        incoming.feed(memoryview(piece))
    return len(answer.reply().token_ids)


def _whole() -> bytes:
    job = FakeJob(
        rid="step7-rollout12345.0a1b2c3d00000007",
        prompt=b"[]",
        prompt_tokens=len(_PROMPT_IDS),
        max_new_tokens=_NUM_TOKENS,
        sample_key=0,
        ignore_eos=False,
        return_logprob=True,
        scores_from=None,
        on_end=lambda _: None,
    )
    job.end(Response.of(_NUM_TOKENS).output(0, _NUM_TOKENS), {"type": "length", "length": _NUM_TOKENS})
    return b"".join(reply_parts(job, seconds=1.0, sent=1.0))


def _events() -> list[bytes]:
    """Return the events of a completion in vLLM's form, with the prompt's ids in the first and the end in the last."""
    random = np.random.default_rng(0)
    ids = random.integers(1_000, 20_000, _NUM_TOKENS).tolist()
    logprobs = (-random.exponential(0.8, _NUM_TOKENS)).astype(np.float32).tolist()
    events = []
    for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        told = {"text_offset": [4 * place], "token_logprobs": [logprob], "tokens": [f"token_id:{token}"]}
        choice = {
            "index": 0,
            "text": " abc",
            "logprobs": {**told, "top_logprobs": [{f"token_id:{token}": logprob}]},
            "finish_reason": "length" if place == _NUM_TOKENS - 1 else None,
            "stop_reason": None,
            "token_ids": [token],
            "prompt_token_ids": _PROMPT_IDS.tolist() if place == 0 else None,
        }
        content = {"id": "cmpl-0", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
        events.append(b"data: " + msgspec.json.encode(content) + b"\n\n")
    return [*events, b"data: [DONE]\n\n"]

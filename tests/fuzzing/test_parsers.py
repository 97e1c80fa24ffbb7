"""Whatever a server, a client, a judge or a file says is read or refused by its own error, and by no other.

``make soak`` goes on with it for ``ROLLFEED_FUZZ_SECONDS`` (default 600) of the processor's time in all, from the seed
``ROLLFEED_FUZZ_SEED`` on.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from rollfeed.base.serving import decoded_body
from rollfeed.base.sglang_wire import RequestError
from rollfeed.base.tensor_buckets import bucket_text, make_buckets, read_bucket
from rollfeed.chat_apis import CHAT_APIS, ApiError
from rollfeed.config import TinyModelSettings
from rollfeed.engine.dialects.sglang.replies import SGLangAnswer
from rollfeed.engine.dialects.vllm.replies import VLLMAnswer
from rollfeed.engine.gguf import read_architecture
from rollfeed.engine.http.client import TryFailedError
from rollfeed.engine.http.incoming import BrokenConnectionError, Incoming
from rollfeed.engine.tiny import tiny_checkpoint
from rollfeed.errors import CheckpointError, ConfigError, EngineError, RunFailedError
from rollfeed.gateway.session_journal import FolderJournal, SessionOpened
from rollfeed.model_files import read_headers
from rollfeed.prompts.tokenizer import load_tokenizer
from rollfeed.rewards.judging.verdict_texts import JudgeCompletion, UnreadableVerdictError
from rollfeed.router.request_fields import read_fields
from rollfeed.router.span_cache import SpanCache
from rollfeed.testing import CharTokenizer
from rollfeed.weights.transports.delta import CheckpointStore
from rollfeed.weights.transports.delta.encoding import DamagedError
from rollfeed.weights.transports.delta.files import CheckpointPieces, _file_checksum, write_delta

SECONDS = float(os.environ.get("ROLLFEED_FUZZ_SECONDS", "600"))
FIRST_SEED = int(os.environ.get("ROLLFEED_FUZZ_SEED", "0"))
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 1e308, -1e30, 0.7, 5e-324]),
    st.text(max_size=8),
    st.sampled_from(["\x00", "<|im_end|>", "</think>", "stop", "abort", "-", "9" * 400]),
    st.lists(st.integers(-2, 300), max_size=4),
    st.just({}),
    st.just([]),
    st.just([[[]]]),
    st.just({"type": "text", "text": "x"}),
)


@st.composite
def mutated(draw: st.DrawFn, tree: Any) -> Any:
    """A value that is like ``tree`` but for a few places."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(0, 3))):
        places: list[tuple[Any, Any]] = []
        waiting = [tree]
        while waiting:
            node = waiting.pop()
            keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
            places += [(node, key) for key in keys]
            waiting += [node[key] for key in keys]
        if not places:
            return draw(ODD)
        node, key = places[draw(st.integers(0, len(places) - 1))]
        if draw(st.booleans()):
            node[key] = copy.deepcopy(draw(ODD))
        elif isinstance(node, dict):
            del node[key]
        else:
            node.insert(key, node[key])
    return tree


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes that are like ``content`` but for a few places."""
    made = bytearray(content)
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(made)))
        change = draw(st.sampled_from(["flip", "cut", "insert", "repeat", "nest"]))
        if change == "flip" and place < len(made):
            made[place] ^= 1 << draw(st.integers(0, 7))
        elif change == "cut":
            del made[place : place + draw(st.integers(1, 40))]
        elif change == "insert":
            made[place:place] = draw(st.binary(min_size=1, max_size=12))
        elif change == "nest":
            made[place:place] = draw(st.sampled_from([b"[", b'{"a":', b"\x91", b"\x81\xa1a"])) * 2_000
        else:
            made[place:place] = made[place : place + draw(st.integers(1, 40))]
    return bytes(made)


def damaged_json(content: bytes) -> st.SearchStrategy[bytes]:
    """JSON that is nearly right, and bytes that nearly are."""
    return mutated(json.loads(content)).map(lambda made: json.dumps(made).encode()) | damaged(content)


def asked_otherwise(body: tuple[str, Any]) -> st.SearchStrategy[tuple[str, Any]]:
    path, tree = body
    return mutated(tree).map(lambda made: (path, made))


SGLANG = {
    "text": "ab",
    "output_ids": [5, 6],
    "meta_info": {
        "id": "a",
        "finish_reason": {"type": "stop", "matched": 6},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "weight_version": "7",
        "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None]],
        "weight_versions": [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 2}],
    },
}
VLLM = {
    "id": "cmpl-a",
    "choices": [
        {
            "index": 0,
            "text": "ab",
            "token_ids": [5, 6],
            "prompt_token_ids": [1, 2, 3],
            "logprobs": {"token_logprobs": [-0.5, -0.25], "tokens": ["token_id:5", "token_id:6"]},
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}},
}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ASKED: Mapping[str, Any] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
        ],
        "tools": [TOOL],
        **{"tool_choice": "auto", "max_tokens": 5, "stop": ["x"], "seed": 3, "stream": False, "logprobs": True},
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": {}}],
        **{"instructions": "s", "max_output_tokens": 5, "reasoning": {"effort": "low"}, "text": {"format": {}}},
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]},
        ],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
        **{"max_tokens": 5, "stop_sequences": ["x"], "thinking": {"type": "enabled", "budget_tokens": 3}},
    },
}
JUDGED = {
    "choices": [
        {
            "message": {"content": "<think>b</think> Score: 7/10", "tool_calls": [CALL]},
            "finish_reason": "stop",
            "logprobs": {"content": [{"token": "A", "top_logprobs": [{"token": "A", "logprob": -0.1}]}]},
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}
HTTP = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n7\r\ndata: 1\r\n9\r\n\n\ndata: 2\r\n"
HTTP += b"10\r\n\n\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def sglang(content: bytes) -> None:
    answer = SGLangAnswer(max_new_tokens=4, with_mask=False, with_text=True)
    answer.take(content)
    answer.reply()


def vllm(content: bytes) -> None:
    prompt = np.array([1, 2, 3], np.int32)
    answer = VLLMAnswer(prompt_ids=prompt, max_new_tokens=4, exact=True, tokenizer=CharTokenizer())
    for _ in range(2):
        answer.take(content)
    answer.reply()


def stream(content: bytes) -> None:
    taken: list[bytes] = []
    incoming = Incoming(most_bytes=1 << 16, events=taken.append)
    for start in range(0, len(content), 13):
        incoming.feed(memoryview(content[start : start + 13]))
    incoming.end_with_connection()
    if incoming.is_whole:
        incoming.reply()


def chats(body: tuple[str, Any]) -> None:
    path, content = body
    asked = CHAT_APIS[path].read(content)
    asked.check_length(10)


def router(content: bytes) -> None:
    read_fields(content, {}, with_prompt=True)


def bodies(content: bytes) -> None:
    coroutine = decoded_body(content, large_bytes=1 << 20)
    with suppress(StopIteration):  # it waits for nothing
        coroutine.send(None)
    coroutine.close()


def judged(content: Any) -> None:
    reply = JudgeCompletion.read(content)
    assert isinstance(reply.shown, str)


def bucket(content: bytes) -> None:
    read_bucket(base64.b64encode(content).decode())


BUCKET = base64.b64decode(bucket_text(next(iter(make_buckets([("w", torch.ones(3))], most_bytes=99)))))


class Files:
    """Parsers of files, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text('{"model_type": "llama"}')
        save_file({"w": np.ones(3, np.float32), "v": np.zeros((2, 2), np.float32)}, model / "model.safetensors")
        self._model = model
        self.weights = (model / "model.safetensors").read_bytes()
        write_delta(folder / "delta", CheckpointPieces(model), policy_version=1, old_sums={})
        self.delta = (folder / "delta").read_bytes()
        journal = FolderJournal(folder / "sessions")
        for number in range(3):
            journal.opened(SessionOpened(f"s{number}", f"k{number}", number, 0.0, {}))
        journal.close()
        self.turns = next(path for path in (folder / "sessions").iterdir() if path.stat().st_size)
        self.journal = self.turns.read_bytes()
        self.store = CheckpointStore(folder / "store")
        self.spans = SpanCache(load_tokenizer(tiny_checkpoint(TinyModelSettings(), seed=0)), num_tokens=1 << 12)

    def keep_spans(self, reply: Any) -> None:
        body = self.spans.rewrite({"text": ["ab", "abc"], "sampling_params": {"n": 2}})
        self.spans.keep(body, reply, policy_version=7)
        for text in ("abab", "ab"):
            with suppress(RequestError):
                self.spans.retrieve(text)

    def read_weights(self, content: bytes) -> None:
        (self._model / "model.safetensors").write_bytes(content)
        read_headers(self._model)

    def read_gguf(self, content: bytes) -> None:
        (self._folder / "a.gguf").write_bytes(content)
        read_architecture(self._folder / "a.gguf")

    def read_delta(self, content: bytes) -> None:
        """As a publisher that lies would send it: with the right checksum of what is wrong."""
        path = self._folder / "damaged"
        path.write_bytes(content)
        if len(content) > 40:
            with path.open("rb") as file:
                checksum = _file_checksum(file, len(content) - 32)
            path.write_bytes(content[:-32] + checksum)
        self.store.receive(path)

    def read_journal(self, content: bytes) -> None:
        self.turns.write_bytes(content)
        FolderJournal(self.turns.parent).close()


GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (2).to_bytes(8, "little")
GGUF += (3).to_bytes(8, "little") + b"abc" + (4).to_bytes(4, "little") + bytes(4)
GGUF += (20).to_bytes(8, "little") + b"general.architecture" + (8).to_bytes(4, "little")
GGUF += (5).to_bytes(8, "little") + b"llama"


class Case(NamedTuple):
    """A parser, what it reads, how that is changed, and the errors that it may raise then."""

    read: Callable[[Any], None]
    contents: Sequence[Any]
    changed: Callable[[Any], st.SearchStrategy[Any]]
    errors: tuple[type[Exception], ...]


def cases(files: Files) -> dict[str, Case]:
    request = {"input_ids": [[1, 2]], "text": "x", "rid": ["a"], "session_params": {"id": "s"}, "user": "u"}
    sglangs, vllms, requests, many = (
        [json.dumps(tree).encode()] for tree in (SGLANG, VLLM, request, [request, VLLM, [[[]] * 5] * 9])
    )
    engine = (EngineError, TryFailedError)
    streams = [HTTP % kind for kind in (b"text/event-stream", b"application/json")]
    return {
        "SGLang's replies": Case(sglang, sglangs, damaged_json, engine),
        "vLLM's replies": Case(vllm, vllms, damaged_json, engine),
        "streams": Case(stream, streams, damaged, (BrokenConnectionError,)),
        "chats": Case(chats, [*ASKED.items()], asked_otherwise, (ApiError,)),
        "the router's requests": Case(router, requests, damaged_json, (RequestError,)),
        "replies for the span cache": Case(files.keep_spans, [SGLANG, [SGLANG, {**SGLANG, "index": 1}]], mutated, ()),
        "bodies": Case(bodies, many, damaged_json, (ValueError,)),
        "judges' replies": Case(judged, [JUDGED], mutated, (UnreadableVerdictError,)),
        "buckets": Case(bucket, [BUCKET], damaged, (ValueError,)),
        "headers of weights": Case(files.read_weights, [files.weights], damaged, (CheckpointError,)),
        "GGUF": Case(files.read_gguf, [GGUF], damaged, (CheckpointError,)),
        "deltas": Case(files.read_delta, [files.delta], damaged, (DamagedError, OSError)),
        "journals": Case(files.read_journal, [files.journal], damaged, (ConfigError, RunFailedError)),
    }


NAMES = [
    *("SGLang's replies", "vLLM's replies", "streams", "chats", "the router's requests"),
    *("replies for the span cache", "bodies", "judges' replies"),
    *("buckets", "headers of weights", "GGUF", "deltas", "journals"),
]


def check(files: Files, name: str, **options: Any) -> Callable[[], None]:
    case = cases(files)[name]

    @settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), **options)
    @given(st.one_of(map(case.changed, case.contents)))
    def reads_or_refuses(content: Any) -> None:
        with suppress(case.errors):
            case.read(content)

    return reads_or_refuses


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    made = Files(tmp_path_factory.mktemp("fuzzed"))
    yield made
    made.store.close()


def test_what_is_changed_is_read_as_it_was_without_an_error(files: Files) -> None:
    found = cases(files)
    assert list(found) == NAMES
    for case in found.values():
        for content in case.contents:
            case.read(content)


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_is_read_or_refused_by_its_own_error(files: Files, name: str) -> None:
    check(files, name, max_examples=60, derandomize=True)()


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", NAMES)
def test_minutes_of_what_comes_are_read_or_refused_by_their_own_errors(files: Files, name: str) -> None:
    ends_at, number = time.process_time() + SECONDS / len(NAMES), FIRST_SEED
    while time.process_time() < ends_at:
        number += 1
        seed(number)(check(files, name, max_examples=500))()

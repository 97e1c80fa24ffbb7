"""The experts that vLLM returns with a response, and what is none."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.openai.conftest import COMPLETIONS, TOKENS, npy
from tests.engine.openai.test_faults import DONE, event, streamed

from rollfeed.engine.client.replies import Reply
from rollfeed.engine.dialects.vllm.replies import VLLMAnswer
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.testing import CharTokenizer
from rollfeed.types import FinishKind, FinishReason, SamplingMask, VersionSpan

CAPTURED = json.loads((Path(__file__).parent / "experts_of_vllm.json").read_text())
"""Of a real one."""
PROMPT = np.array([97, 98, 99], np.int32)


def experts(num_tokens: int) -> np.ndarray:
    """Two layers, of two experts a token each."""
    return (np.arange(num_tokens * 4) % 11).astype(np.uint8).reshape(num_tokens, 2, 2)


def expert_file(num_tokens: int) -> bytes:
    return npy(experts(num_tokens))


@pytest.mark.parametrize("pieces", [[CAPTURED["whole"]], CAPTURED["stream"]], ids=["whole", "stream"])
def test_experts_that_a_real_server_has_returned_are_read(pieces: list[Any]) -> None:
    prompt_ids = np.array(CAPTURED["prompt_ids"], np.int32)
    answer = VLLMAnswer(
        prompt_ids=prompt_ids, max_new_tokens=6, exact=True, with_experts=True, tokenizer=CharTokenizer()
    )
    for piece in pieces:
        answer.take(json.dumps(piece).encode())
    reply = answer.reply()
    content = base64.b64decode(pieces[-1]["choices"][0]["routed_experts"])
    expected = np.load(io.BytesIO(content)).reshape(10, 6)
    assert len(reply.token_ids) == 6
    assert reply.routed_experts.numbers.tolist() == expected.tolist()


def taken(content: bytes, *, with_experts: bool = True) -> Any:
    answer = VLLMAnswer(
        prompt_ids=PROMPT, max_new_tokens=3, exact=True, with_experts=with_experts, tokenizer=CharTokenizer()
    )
    logprobs = {"content": [{"token": f"token_id:{i}", "logprob": -1.0} for i in (100, 101, 102)]}
    choice = {"token_ids": [100, 101, 102], "logprobs": logprobs, "finish_reason": "length"}
    answer.take(json.dumps({"choices": [{**choice, "routed_experts": base64.b64encode(content).decode()}]}).encode())
    return answer.reply().routed_experts


@pytest.mark.parametrize("stream", [True, False])
async def test_experts_come_with_the_end_of_a_response(vllm: Any, engine_at: Any, asked: Any, stream: bool) -> None:
    async with vllm(expert_file=expert_file) as server, engine_at(server, stream=stream) as engine:
        completion = await engine.generate(PROMPT, asked(return_routed_experts=True), request_id="r")
        without = await engine.generate(PROMPT, asked(), request_id="w")
    assert without.routed_experts is None
    assert (completion.routed_experts.per_token, completion.routed_experts.width) == (4, 1)
    assert np.array_equal(completion.routed_experts.numbers, experts(8).reshape(8, 4))


async def test_a_response_that_goes_on_has_the_experts_of_all_its_tokens(vllm: Any, engine_at: Any, asked: Any) -> None:
    """The first part was cut off, and has none: they come with the rest."""
    async with vllm(expert_file=expert_file, abort_at=2) as server, engine_at(server) as engine:
        completion = await engine.generate(PROMPT, asked(return_routed_experts=True), request_id="r")
        assert [len(body["token_ids"]) for body in server.bodies] == [3, 5]
    assert completion.finish_reason.kind is FinishKind.LENGTH
    assert np.array_equal(completion.routed_experts.numbers, experts(8).reshape(8, 4))


@pytest.mark.parametrize("num_tokens", [1, 6])
async def test_a_response_cut_off_at_its_last_token_has_the_experts_of_all_its_tokens(
    vllm: Any, engine_at: Any, asked: Any, num_tokens: int
) -> None:
    """The last one is asked for again, and its experts come with it."""
    params = asked(return_routed_experts=True, max_new_tokens=num_tokens)
    async with vllm(expert_file=expert_file, abort_at=num_tokens) as server, engine_at(server) as engine:
        completion = await engine.generate(PROMPT, params, request_id="r")
        assert [len(body["token_ids"]) for body in server.bodies] == [3, 2 + num_tokens]
    assert completion.finish_reason.kind is FinishKind.LENGTH
    assert [(span.start, span.end) for span in completion.version_spans] == [(0, num_tokens)]
    assert np.array_equal(completion.routed_experts.numbers, experts(2 + num_tokens).reshape(-1, 4))


async def test_a_token_that_always_comes_without_its_experts_is_no_answer(
    vllm: Any, engine_at: Any, asked: Any
) -> None:
    faults = [streamed(event([97]), DONE)] * 9
    async with vllm(expert_file=expert_file, faults=faults) as server, engine_at(server, max_tries=3) as engine:
        with pytest.raises(EngineUnavailableError, match=r"no answer after 3 failed tries; .* aborted by the server"):
            await engine.generate(PROMPT, asked(1, return_routed_experts=True), request_id="r")


def test_a_reply_without_its_last_token_says_nothing_of_it() -> None:
    reply = Reply(
        np.array([5, 6, 7], np.int32),
        np.array([-1.0, -2.0, -3.0], np.float32),
        FinishReason(FinishKind.ABORT),
        version_spans=(VersionSpan(0, 1, 3), VersionSpan(1, 3, 4)),
        sampling_mask=SamplingMask.of([[5], [6, 8], [7, 9]]),
        text="abc",
    )
    shorter = reply.without_last()
    assert (shorter.token_ids.tolist(), shorter.logprobs.tolist(), shorter.text) == ([5, 6], [-1.0, -2.0], None)
    assert shorter.version_spans == (VersionSpan(0, 1, 3), VersionSpan(1, 2, 4))
    assert shorter.sampling_mask is not None
    assert [each.tolist() for each in shorter.sampling_mask.split()] == [[5], [6, 8]]
    assert shorter.without_last().version_spans == (VersionSpan(0, 1, 3),)


@pytest.mark.parametrize(
    ("changes", "route"), [({}, TOKENS), ({"expert_file": expert_file, "routes": {COMPLETIONS}}, COMPLETIONS)]
)
async def test_a_server_that_returns_none_is_refused(
    vllm: Any, engine_at: Any, asked: Any, changes: dict[str, Any], route: str
) -> None:
    async with vllm(**changes) as server, engine_at(server) as engine:
        message = f"{route} returns no routed_experts, .* --enable-return-routed-experts and --enable-scale-out"
        with pytest.raises(EngineProtocolError, match=message):
            await engine.generate(PROMPT, asked(return_routed_experts=True), request_id="r")
        await engine.generate(PROMPT, asked(), request_id="w")


def headed(header: str) -> bytes:
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(20)


@pytest.mark.parametrize(
    "content",
    [
        b"no file",
        b"",
        expert_file(4),
        expert_file(5)[:-1],
        expert_file(5) + b"\0",
        npy(experts(5).reshape(5, 4)),
        npy(experts(5).astype(np.float32)),
        npy(np.asfortranarray(experts(5))),
        npy(experts(5).astype(np.int32) - 1),
        npy(experts(5).astype(np.int64) + (1 << 16)),
        npy(np.zeros((5, 0, 2), np.uint8)),
        headed("{'descr': '|u1', 'fortran_order': False, 'shape': (5, 99999999999, 99999999999), }"),
        headed("{'descr': '|O', 'fortran_order': False, 'shape': (5, 2, 2), }"),
        headed("{'descr': '|u1', 'fortran_order': False, 'shape': (5, -2, 2), }"),
        headed("__import__('os')"),
        headed("(" * 100),
    ],
    ids=lambda content: content[:90].decode("latin-1").strip()[-60:] or "nothing",
)
def test_what_is_no_file_of_experts_is_refused(content: bytes) -> None:
    with pytest.raises(EngineProtocolError, match="its routed_experts cannot be read"):
        taken(content)


async def test_what_was_not_asked_for_is_not_read(vllm: Any, engine_at: Any, asked: Any) -> None:
    """Experts of a prompt come as well, whose bytes are more than those of its numbers."""
    assert taken(b"no file", with_experts=False) is None
    assert taken(expert_file(5)).num_tokens == 5
    prompt = np.full(3000, PROMPT[0], np.int32)
    for content in (b"no file", npy(np.zeros((3005, 60, 10), np.uint16))):
        async with vllm(expert_file=lambda _, content=content: content) as server, engine_at(server) as engine:
            completion = await engine.generate(prompt, asked(), request_id="r")
        assert (len(completion.token_ids), completion.routed_experts) == (6, None)
        assert {path for path, _ in server.requests} == {TOKENS}

"""Replies as a real server sent them, and replies that must not pass."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfeed.engine.client.versions import version_number
from rollfeed.engine.dialects.sglang.replies import decode_reply
from rollfeed.engine.http import Failure, TryFailedError
from rollfeed.errors import EngineProtocolError
from rollfeed.types import FinishKind, FinishReason, VersionSpan

CAPTURED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "server" / "data" / "sglang_wire.json").read_text())
Reply = Callable[..., dict[str, Any]]


def span(start: int, end: int, version: str = "3") -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


def encoded(content: Any) -> bytes:
    return json.dumps(content).encode()


def test_the_servers_text_is_read_where_it_is_wanted(reply: Reply) -> None:
    content = encoded(reply([4, 5, 2]))
    assert decode_reply(content, max_new_tokens=9).text is None
    assert decode_reply(content, max_new_tokens=9, with_text=True).text == "efc"


@pytest.mark.parametrize("name", [name for name, each in CAPTURED.items() if "reply" in each])
def test_captured_replies_give_the_values_that_json_gives(name: str) -> None:
    captured = CAPTURED[name]["reply"]
    pairs = captured["meta_info"].get("output_token_logprobs", [])
    reply = decode_reply(encoded(captured), max_new_tokens=1000)
    assert reply.token_ids.dtype == np.int32
    assert reply.token_ids.tolist() == captured["output_ids"]
    assert np.array_equal(reply.logprobs, np.array([pair[0] for pair in pairs], np.float32))
    assert reply.finish_reason.kind.value == captured["meta_info"]["finish_reason"]["type"]
    assert reply.finish_reason.matched == captured["meta_info"]["finish_reason"].get("matched")
    assert reply.policy_version == version_number(captured["meta_info"]["weight_version"])
    assert reply.prompt_tokens == captured["meta_info"]["prompt_tokens"]
    assert reply.cached_tokens == captured["meta_info"]["cached_tokens"]


def test_experts_are_read_from_int32_for_all_tokens_but_the_last(reply: Reply) -> None:
    numbers = np.arange(24, dtype="<i4").reshape(4, 6)

    def with_experts(content: bytes) -> dict[str, Any]:
        return reply([4, 5], prompt_tokens=3, routed_experts=base64.b64encode(content).decode())

    got = decode_reply(encoded(with_experts(numbers.tobytes())), max_new_tokens=9)
    assert got.routed_experts is not None
    assert got.routed_experts.width == 1
    assert got.routed_experts.numbers.tolist() == numbers.tolist()
    for content in (numbers.tobytes()[:-4], b"", (numbers - 1).tobytes(), (numbers + 65520).tobytes()):
        with pytest.raises(EngineProtocolError, match="routed"):
            decode_reply(encoded(with_experts(content)), max_new_tokens=9)


def test_experts_that_a_real_server_has_returned_are_read() -> None:
    """SGLang 0.5.23 with --enable-return-routed-experts, of a Qwen3-MoE of three layers, eight experts, two a token."""
    captured = json.loads((Path(__file__).parent / "experts_of_sglang.json").read_text())
    routed = decode_reply(encoded(captured), max_new_tokens=9).routed_experts
    assert routed is not None
    assert (routed.num_tokens, routed.per_token, routed.width) == (10, 6, 1)
    told = np.frombuffer(base64.b64decode(captured["meta_info"]["routed_experts"]), "<i4")
    assert routed.numbers.flatten().tolist() == told.tolist()


def test_log_probabilities_are_those_among_what_was_kept_where_that_is_asked_for(reply: Reply) -> None:
    mask = {"output_token_sampling_mask": [[9, 4], [5]], "output_token_sampling_logprobs": [-0.25, 0.0]}
    content = encoded(reply([4, 5], **mask, output_token_sampling_mask_length=2))
    got = decode_reply(content, max_new_tokens=9, with_mask=True)
    assert got.sampling_mask is not None
    assert [each.tolist() for each in got.sampling_mask.split()] == [[9, 4], [5]]
    assert got.logprobs.tolist() == [-0.25, 0.0]
    assert decode_reply(content, max_new_tokens=9).logprobs.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({}, "no output_token_sampling_mask, which sampling.return_sampling_mask asks for: SGLang has it from 0.5.23"),
        ({"output_token_sampling_mask": [[9], [5]]}, "a token is not among those that it was drawn from"),
        ({"output_token_sampling_mask": [[4]]}, "sampling mask of 1 tokens for 2"),
        ({"output_token_sampling_mask": [[4], []]}, "are not those of 2 tokens"),
        ({"output_token_sampling_mask": [[4], [5]], "output_token_sampling_logprobs": [0.0]}, "not those of 2 tokens"),
    ],
)
def test_a_sampling_mask_that_does_not_fit_is_refused(reply: Reply, meta: dict[str, Any], said: str) -> None:
    content = reply([4, 5], **({"output_token_sampling_logprobs": [-0.5, -0.5], **meta} if meta else {}))
    with pytest.raises(EngineProtocolError, match=said):
        decode_reply(encoded(content), max_new_tokens=9, with_mask=True)


def test_a_captured_abort_without_arrays_is_no_tokens() -> None:
    reply = decode_reply(encoded({"text": "gone", "meta_info": _aborted_meta()}), max_new_tokens=1000)
    assert (len(reply.token_ids), len(reply.logprobs)) == (0, 0)
    assert reply.finish_reason == FinishReason(FinishKind.ABORT)


def _aborted_meta() -> dict[str, Any]:
    meta: dict[str, Any] = CAPTURED["aborted_meta_without_arrays"]
    return meta


@given(st.lists(st.tuples(st.floats(-1e30, 0.0), st.integers(0, 2**31 - 1)), max_size=40), st.booleans())
def test_any_numbers_arrive_as_json_and_float32_have_them(tokens: list[tuple[float, int]], spaced: bool) -> None:
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[p, i, None] for p, i in tokens]}
    text = json.dumps({"output_ids": [i for _, i in tokens], "meta_info": meta}, indent=1 if spaced else None)
    reply = decode_reply(text.encode(), max_new_tokens=100)
    assert reply.token_ids.tolist() == [i for _, i in tokens]
    assert np.array_equal(reply.logprobs, np.array([p for p, _ in tokens], np.float32))


def test_r11_the_sampled_stop_token_counts(reply: Reply) -> None:
    got = decode_reply(encoded(reply([4, 5, 2], finish={"type": "stop", "matched": 2})), max_new_tokens=9)
    assert got.token_ids.tolist() == [4, 5, 2]
    assert len(got.logprobs) == 3
    assert got.finish_reason == FinishReason(FinishKind.STOP, 2)


def _trimmed(reply: dict[str, Any], *, ids: bool) -> dict[str, Any]:
    if ids:
        reply["output_ids"].pop()
    else:
        reply["meta_info"]["output_token_logprobs"].pop()
    return reply


@pytest.mark.parametrize("ids", [True, False])
def test_r11_a_list_that_lacks_the_stop_token_is_refused(reply: Reply, ids: bool) -> None:
    trimmed = _trimmed(reply([4, 5, 2], finish={"type": "stop", "matched": 2}), ids=ids)
    del trimmed["meta_info"]["completion_tokens"], trimmed["meta_info"]["output_token_logprobs_length"]
    with pytest.raises(EngineProtocolError, match="output_ids"):
        decode_reply(encoded(trimmed), max_new_tokens=9)


def test_r11_a_stop_token_trimmed_from_both_lists_is_refused(reply: Reply) -> None:
    with pytest.raises(EngineProtocolError, match="stopped at token 2"):
        decode_reply(encoded(reply([4, 5], finish={"type": "stop", "matched": 2})), max_new_tokens=9)


def test_r17_an_abort_before_the_first_token_needs_no_logprobs() -> None:
    got = decode_reply(b'{"text":"","meta_info":{"finish_reason":{"type":"abort"}}}', max_new_tokens=9)
    assert len(got.token_ids) == 0
    assert got.finish_reason.kind is FinishKind.ABORT
    assert got.policy_version is None


def test_r21_length_is_told_from_stop(reply: Reply) -> None:
    cut = decode_reply(encoded(reply([4, 5])), max_new_tokens=2)
    assert cut.finish_reason == FinishReason(FinishKind.LENGTH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["meta_info"].pop("finish_reason"), "finish_reason"),
        (lambda r: r["meta_info"].update(finish_reason=None), "finish_reason"),
        (lambda r: r["meta_info"].update(finish_reason={"type": "tired"}), "tired"),
        (lambda r: r["meta_info"].pop("output_token_logprobs"), "without output_token_logprobs"),
        (lambda r: r["meta_info"]["output_token_logprobs"].pop(), "1 logprobs, but 2"),
        (lambda r: r["meta_info"]["output_token_logprobs"].append([-0.1, 5, None]), "3 logprobs, but 2"),
        (lambda r: r["meta_info"].update(completion_tokens=7), "7 by its completion_tokens"),
        (lambda r: r["meta_info"].update(output_token_logprobs=[[None, 5, None]] * 2), "logprob"),
        (lambda r: r["meta_info"].update(output_token_logprobs=[[-0.1, 2**31, None]] * 2), "out of range"),
        (lambda r: r["meta_info"].update(output_token_logprobs=[[-0.1, 4.5, None]] * 2), "no integers"),
        (lambda r: r.update(output_ids=[4, -5]), "not the ids beside"),
        (lambda r: r.update(output_ids=[4, 2**32 + 5]), "not the ids beside"),
        (lambda r: r.update(output_ids=[1, 2.5]), "not all integers"),
        (lambda r: r.update(output_ids=[1, None]), "not all integers"),
        (lambda r: r.update(output_ids=[1]), "2 logprobs, but 1 by its output_ids"),
        (lambda r: r["meta_info"].update(weight_version="release"), "release"),
        (lambda r: r["meta_info"].update(weight_version=[1]), "weight_version"),
        (lambda r: r["meta_info"].update(weight_versions=[span(0, 1)]), r"weight_versions: .*cover 1 of 2"),
        (lambda r: r["meta_info"].update(weight_versions=[span(0, 1), span(0, 2)]), "weight_versions: .*in order"),
        (lambda r: r["meta_info"].update(weight_versions=[span(1, 2)]), "weight_versions: .*in order"),
        (lambda r: r["meta_info"].update(weight_versions=[span(0, 3)]), "weight_versions: .*cover 3 of 2"),
        (lambda r: r["meta_info"].update(weight_versions=[]), "weight_versions: .*cover 0 of 2"),
        (lambda r: r["meta_info"].update(weight_versions=[{"version": "3", "start": 0}]), "end"),
        (lambda r: r.pop("meta_info"), "meta_info"),
    ],
)
def test_what_breaks_the_contract_is_refused(reply: Reply, change: Callable[[Any], Any], message: str) -> None:
    content = reply([4, 5])
    change(content)
    with pytest.raises(EngineProtocolError, match=message):
        decode_reply(encoded(content), max_new_tokens=9)


def test_more_tokens_than_were_asked_for_are_refused(reply: Reply) -> None:
    with pytest.raises(EngineProtocolError, match="3 tokens, 2 were asked for"):
        decode_reply(encoded(reply([1, 2, 3])), max_new_tokens=2)


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_truncated_json_may_be_tried_again(reply: Reply, cut: int) -> None:
    with pytest.raises(TryFailedError) as caught:
        decode_reply(encoded(reply([4, 5]))[:cut], max_new_tokens=9)
    assert caught.value.failure is Failure.BROKEN


@pytest.mark.parametrize(("status", "expected"), [(400, EngineProtocolError), (503, TryFailedError)])
def test_an_abort_with_a_status_is_the_servers_error(reply: Reply, status: int, expected: type[Exception]) -> None:
    finish = {"type": "abort", "message": "no room", "status_code": status, "err_type": "X"}
    with pytest.raises(expected, match="no room"):
        decode_reply(encoded(reply([], finish=finish)), max_new_tokens=9)


def test_spans_of_several_versions_are_kept(reply: Reply) -> None:
    content = reply([1, 2, 3], version="4", weight_versions=[span(0, 2, "default"), span(2, 3, "4")])
    got = decode_reply(encoded(content), max_new_tokens=9)
    assert got.version_spans == (VersionSpan(0, 2, 0), VersionSpan(2, 3, 4))


def test_a_reply_without_tokens_has_no_spans(reply: Reply) -> None:
    content = reply([], weight_versions=[span(0, 0, "default")])
    assert decode_reply(encoded(content), max_new_tokens=9).version_spans == ()


@pytest.mark.parametrize(("name", "number"), [("default", 0), ("7", 7), ("v7", 7), ("step-000012", 12), (3, 3)])
def test_versions_are_numbers(name: str | int, number: int) -> None:
    assert version_number(name) == number


def test_ids_beside_the_logprobs_do_where_there_is_no_other_list(reply: Reply) -> None:
    content = reply([4, 2**31 - 1])
    del content["output_ids"]
    assert decode_reply(encoded(content), max_new_tokens=9).token_ids.tolist() == [4, 2**31 - 1]
    content["meta_info"]["output_token_logprobs"][1] = [-0.5, "x", None]
    with pytest.raises(EngineProtocolError, match="reply to /generate"):
        decode_reply(encoded(content), max_new_tokens=9)

"""What a router reads of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollfeed.base.sglang_wire import RequestError
from rollfeed.router.request_fields import RequestFields, read_fields


def read(body: Any, **headers: str) -> RequestFields:
    return read_fields(json.dumps(body).encode(), headers, with_prompt=True)


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [3, 1, 2]},
        {"input_ids": [[3, 1, 2], [4]]},
        {"token_ids": [3, 1, 2]},
        {"prompt": [3, 1, 2]},
        {"prompt": [[3, 1, 2], [5]]},
    ],
)
def test_token_ids_are_found_wherever_a_route_has_them(body: dict[str, Any]) -> None:
    assert read(body).prompt_ids.tolist() == [3, 1, 2]


def test_a_longer_conversation_begins_with_the_ids_of_a_shorter_one() -> None:
    turns = [{"role": "user", "content": "Count to three."}, {"role": "assistant", "content": "1 2 3"}]
    short = read({"messages": turns[:1]}).prompt_ids
    long = read({"messages": turns}).prompt_ids
    assert 8 < len(short) < len(long)
    assert long[: len(short)].tolist() == short.tolist()
    assert read({"messages": [{"role": "user", "content": "Other"}]}).prompt_ids.tolist() != short.tolist()


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({}, {"X-SMG-Routing-Key": "session-1"}),
        ({}, {"X-Session-Id": "session-1"}),
        ({"session_params": {"id": "session-1", "rid": None}}, {}),
        ({"routing_key": "session-1", "user": "somebody"}, {}),
        ({"session_id": "session-1"}, {}),
        ({"prompt_cache_key": "session-1", "user": "somebody"}, {}),
        ({"user": "session-1"}, {}),
    ],
)
def test_session_keys_are_found_where_users_of_other_routers_put_them(
    body: dict[str, Any], headers: dict[str, str]
) -> None:
    assert read_fields(json.dumps(body).encode(), headers, with_prompt=False).session == "session-1"


def test_ids_of_requests_are_those_of_either_form() -> None:
    assert read({"rid": "a"}).rids == ("a",)
    assert read({"rid": ["a", "b"]}).rids == ("a", "b")
    assert read({"request_id": "c"}).rids == ("c",)
    assert read({}).rids == ()


def test_fields_of_wrong_types_are_left_to_the_worker_and_bodies_that_are_no_json_are_not() -> None:
    assert read({"rid": 7}).rids == ()
    for ids in ([1 << 40], [], [[]], ["text"], "none", 7):
        assert read({"input_ids": ids}).prompt_ids.tolist() == []
    for body in (b"{", b'{"rid": "\xff"}', b'{"user": ' + b"[" * 5000):
        with pytest.raises(RequestError, match="not JSON"):
            read_fields(body, {}, with_prompt=True)

"""Requests of real agents are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollfeed.chat_apis import AnthropicMessages, Asked, OpenAIChat, OpenAIResponses

CAPTURES = sorted((Path(__file__).parent / "captures").glob("*.json"))
READERS = {
    "/v1/chat/completions": OpenAIChat().read,
    "/v1/responses": OpenAIResponses().read,
    "/v1/messages": AnthropicMessages().read,
    "/v1/messages/count_tokens": AnthropicMessages().read_count,
}
LEFT_OUT = {"codex": ("tools[8] (web_search)",)}


def requests_of(path: Path) -> list[Any]:
    requests: list[Any] = json.loads(path.read_text())["requests"]
    return requests


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_what_an_agent_sends_is_read_and_nothing_of_it_left_out_that_could_be_shown(path: Path) -> None:
    for request in requests_of(path):
        asked: Asked = READERS[request["path"].partition("?")[0]](request["body"])
        assert set(asked.left_out) == set(LEFT_OUT.get(path.stem, ()))
        given = request["body"].get("tools") or []
        assert len(asked.tools) >= len(given) - len(asked.left_out)
        assert all(isinstance(message["content"], str) for message in asked.messages)


def test_tools_in_a_namespace_are_shown_and_remembered() -> None:
    asked = OpenAIResponses().read(requests_of(Path(__file__).parent / "captures" / "codex.json")[0]["body"])
    assert asked.namespaces["close_agent"] == "multi_agent_v1"
    assert "close_agent" in [tool["function"]["name"] for tool in asked.tools]

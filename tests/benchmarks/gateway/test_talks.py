"""What the agents of the bench read of a reply, whole and streamed, and what they send next."""

import msgspec
import pytest

from rollfeed.benchmarks.gateway.talks import TOOL, Api, begin_talk
from rollfeed.chat_apis import (
    AnthropicMessages,
    ChatApi,
    Finish,
    OpenAIChat,
    OpenAIResponses,
    Said,
    SaidCall,
    stream_of,
)

APIS: dict[Api, ChatApi] = {
    Api.CHAT: OpenAIChat(),
    Api.RESPONSES: OpenAIResponses(),
    Api.MESSAGES: AnthropicMessages(),
}
SAID = Said(
    content="I read.",
    reasoning="",
    calls=(SaidCall("call00000", TOOL, {"number": 3}), SaidCall("call00001", TOOL, {"number": 4, "why": "so"})),
    finish=Finish.TOOL_CALLS,
    stop_sequence=None,
    prompt_tokens=5,
    cached_tokens=0,
    completion_tokens=7,
    logprobs=None,
)


def sent(body: object) -> object:
    return msgspec.json.decode(msgspec.json.encode(body))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", list(Api))
def test_a_talk_sends_back_what_it_was_told(api: Api, stream: bool) -> None:
    form, talk = APIS[api], begin_talk(api, "Be brief.", "Read.")
    asked = form.read(sent(talk.body(stream=stream)))
    about = {"reply_id": form.new_id(), "created": 1}
    if stream:
        events = form.events(asked, **about)
        content = events.opening() + events.ping() + b"".join(stream_of(events, [SAID]))
    else:
        content = msgspec.json.encode(form.reply(asked, [SAID], **about))
    reply = talk.read(content, stream=stream)
    talk.take(reply, lambda arguments: f"part {arguments['number']}")
    system, question, turn, *results = form.read(sent(talk.body(stream=stream))).messages
    assert (system["content"], question["content"]) == ("Be brief.", "Read.")
    assert turn == SAID.message()
    assert [each["tool_call_id"] for each in results] == ["call00000", "call00001"]

"""What a conversation sends between two turns: always what a full render has there, at a cost that does not grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.conversations.zoo.families import FAMILIES, load

from rollfeed.conversations import Chat, Conversation
from rollfeed.errors import ConfigError
from rollfeed.prompts import LocalTokenizer
from rollfeed.protocols import RewrittenTurns
from rollfeed.types import Message, Prompt

QUESTION: Message = {"role": "user", "content": "What is the result?"}


def prompt_of(name: str) -> Prompt:
    tokenizer = load(name)
    text = tokenizer.render_chat([QUESTION])
    ids = tokenizer.encode(text, add_special_tokens=False)
    return Prompt(prompt_id="a", source="s", text=text, token_ids=ids, messages=(QUESTION,))


class CountingTokenizer:
    """A tokenizer that counts the messages that its template is given."""

    def __init__(self, inner: LocalTokenizer) -> None:
        self._inner = inner
        self.num_messages = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **named: Any) -> str:
        self.num_messages += len(messages)
        return self._inner.render_chat(messages, **named)


def messages_rendered(name: str, num_turns: int) -> int:
    """Return how many messages a conversation renders over its turns, having checked what it sends."""
    counting = CountingTokenizer(load(name))
    conversation = Conversation(prompt_of(name), counting)  # type: ignore[arg-type]
    chat, ends = Chat(load(name)), load(name).encode(FAMILIES[name].ends[0], add_special_tokens=False)
    ids, messages, random = prompt_of(name).token_ids, [QUESTION], Random(0)
    for number in range(num_turns):
        said = random.choice(["yes", "no", "caf\u00e9"])
        turn = np.concatenate([load(name).encode(said, add_special_tokens=False), ends])
        after: Message = {"role": "user", "content": f"Sure? {number}"}
        told = conversation.follow_up(turn, [after])
        assert not told.rewrites
        ids = np.concatenate([ids, turn, told.token_ids])
        messages += [{"role": "assistant", "content": said}, after]
    shown = chat.render(messages, add_generation_prompt=True)
    assert load(name).decode(ids, skip_special_tokens=False) == shown
    return counting.num_messages


@pytest.mark.parametrize("name", ["chatml", "qwen2.5", "qwen3", "llama3", "glm4", "merged_results"])
def test_a_turn_renders_as_much_in_a_long_conversation_as_in_a_short_one(name: str) -> None:
    assert messages_rendered(name, 128) / 128 < 1.5 * messages_rendered(name, 8) / 8


def test_a_template_that_counts_messages_is_rendered_whole_in_each_turn() -> None:
    assert messages_rendered("numbered", 64) > 64 * 64


@pytest.mark.parametrize("name", ["counted", "qwen3"])
def test_what_a_template_rewrites_far_from_the_beginning_is_found(name: str) -> None:
    conversation = Conversation(prompt_of(name), load(name), rewritten=RewrittenTurns.FORK)
    messages, forks = [QUESTION], []
    for number in range(20):
        said = "<think>\nWell.\n</think>\n\nyes" if number == 13 else "yes"
        after: Message = {"role": "user", "content": "Sure?"}
        told = conversation.follow_up(load(name).encode(said, add_special_tokens=False), [after])
        messages += [{"role": "assistant", "content": said}, after]
        if told.is_context:
            forks.append(number)
            shown = Chat(load(name)).render(messages, add_generation_prompt=True)
            assert load(name).decode(told.token_ids, skip_special_tokens=False) == shown
    assert forks == ([13] if name == "qwen3" else list(range(20)))


def test_a_conversation_goes_on_from_a_summary() -> None:
    conversation = Conversation(prompt_of("chatml"), load("chatml"))
    end = load("chatml").encode(FAMILIES["chatml"].ends[0], add_special_tokens=False)
    said = np.concatenate([load("chatml").encode("yes", add_special_tokens=False), end])
    conversation.follow_up(said, [QUESTION])
    summary: list[Message] = [{"role": "user", "content": "So far: yes. Go on."}]
    ids = conversation.begin(summary)
    told = conversation.follow_up(said, [QUESTION])
    messages = [*summary, {"role": "assistant", "content": "yes"}, QUESTION]
    shown = Chat(load("chatml")).render(messages, add_generation_prompt=True)
    assert load("chatml").decode(np.concatenate([ids, said, told.token_ids]), skip_special_tokens=False) == shown
    raw = Prompt(prompt_id="a", source="s", text="1+1=", token_ids=said)
    with pytest.raises(ConfigError, match="only begin anew from a prompt with messages"):
        Conversation(raw, load("plain")).begin(summary)

"""Conversations over a zoo of chat templates: what follows a sampled turn, and where turns are in a full render."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.conversations.zoo.families import FAMILIES, Family, load

from rollfeed.conversations import Chat, LossMaskType, Span, audit_template, conversation_tokens
from rollfeed.errors import ConfigError, DataError
from rollfeed.prompts import LocalTokenizer

NUM_CONVERSATIONS = [40, pytest.param(800, marks=pytest.mark.soak)]
"""Of each family, in each of two tests."""
WORDS = ["the", " result", " is", " 42", "\n", "  ", "a", ' {"x": 1}', " caf\u00e9", " and", ".", "\U0001f600"]


def text(random: Random, *, least: int = 1) -> str:
    return "w" + "".join(random.choices(WORDS, k=random.randrange(least, 8))).rstrip() + str(random.randrange(1000))


def call(random: Random) -> dict[str, Any]:
    function = {"name": random.choice(["add", "search"]), "arguments": {"q": text(random), "n": random.randrange(9)}}
    return {"type": "function", "id": "callabcde", "function": function}


def said_by(family: Family, message: dict[str, Any], *, thought: str = "") -> str:
    """Return what a model of the family samples to say a message, but for the token that ends it."""
    calls = [each["function"] for each in message.get("tool_calls", ())]
    shown = [(each["name"], json.dumps(each["arguments"], ensure_ascii=False)) for each in calls]
    content = message["content"]
    if family.name in ("qwen2.5", "qwen3"):
        lines = [
            f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in shown
        ]
        return thought + "\n".join([content, *lines] if content else lines)
    if family.name == "llama3" and shown:
        return f'{{"name": "{shown[0][0]}", "parameters": {shown[0][1]}}}'
    if family.name == "mistral":
        entries = ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in shown)
        return f"[TOOL_CALLS][{entries}]" if shown else f" {content}"
    if family.name == "glm4":
        return content + "".join(f"\n<tool_call>{name}\n{arguments}</tool_call>" for name, arguments in shown)
    if family.name == "merged_results":
        return content + "".join(f"<call>{name} {arguments}</call>" for name, arguments in shown)
    return thought + content


def turn(family: Family, random: Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text(random)}
    if family.tools and random.random() < 0.5:
        message["tool_calls"] = [call(random) for _ in range(random.randrange(1, family.max_calls + 1))]
        if family.name in ("llama3", "mistral"):
            message["content"] = ""
    return message


def follow_up(message: dict[str, Any], random: Random) -> list[dict[str, Any]]:
    if "tool_calls" in message:
        return [{"role": "tool", "content": text(random), "tool_call_id": "callabcde"} for _ in message["tool_calls"]]
    return [{"role": "user", "content": text(random)}]


def conversation(family: Family, random: Random) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": text(random)}] if random.random() < 0.5 else []
    messages.append({"role": "user", "content": text(random)})
    for number in range(random.randrange(1, 5)):
        if number:
            messages += follow_up(messages[-1], random)
        messages.append(turn(family, random))
    return messages


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def template_of(family: Family, random: Random) -> Chat:
    return Chat(load(family.name), tools=TOOLS if family.tools and random.random() < 0.5 else None)


def learned(
    tokenizer: LocalTokenizer, ids: NDArray[np.int32], mask: NDArray[np.float32], *, has_ends: bool = True
) -> list[str]:
    """Return the texts that are learned, without the token that ends each where the conversation goes on."""
    edges = np.flatnonzero(np.diff(mask, prepend=0.0, append=0.0))
    texts = []
    for start, end in edges.reshape(-1, 2):
        run = ids[start:end]
        ends = np.isin(run, tokenizer.eos_token_ids)
        assert not ends[:-1].any()
        assert ends[-1] or end == len(ids) or not has_ends
        texts.append(tokenizer.decode(run[: len(run) - ends[-1]], skip_special_tokens=False))
    return texts


def turns_of(chat: Chat, messages: list[dict[str, Any]]) -> tuple[str, dict[int, Span]]:
    shown = chat.render(messages, add_generation_prompt=False)
    places = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return shown, {index: chat.turn(shown, messages, index) for index in places}


@pytest.mark.parametrize("num_conversations", NUM_CONVERSATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_turns_are_found_in_a_full_render_as_they_would_be_said(name: str, num_conversations: int) -> None:
    family, random = FAMILIES[name], Random(name)
    for _ in range(num_conversations):
        messages = conversation(family, random)
        template = template_of(family, random)
        shown, turns = turns_of(template, messages)
        said = []
        for index, span in turns.items():
            expected = said_by(family, messages[index])
            thought = "<think>\n\n</think>\n\n" if name == "qwen3" and index == len(messages) - 1 else ""
            thought = "\n</think>\n\n" if name == "qwen3.5" else thought
            assert shown[span.start : span.end] == thought + expected, messages
            # Its first line break is one token with the last of the opening.
            said.append((thought + expected).removeprefix("\n"))
        ids, mask = conversation_tokens(load(name), messages, tools=template.tools, mask_type=LossMaskType.QWEN3)
        assert (ids == load(name).encode(shown, add_special_tokens=False)).all()
        assert learned(load(name), ids, mask, has_ends=name != "plain") == said


@pytest.mark.parametrize("num_conversations", NUM_CONVERSATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_follows_a_turn_is_what_a_full_render_has_there(name: str, num_conversations: int) -> None:
    family, random = FAMILIES[name], Random(name)
    num_extended = num_turns = 0
    for _ in range(num_conversations):
        template = template_of(family, random)
        messages = conversation(family, random)[:1] or []
        if messages[0]["role"] == "system":
            messages.append({"role": "user", "content": text(random)})
        sent = template.render(messages, add_generation_prompt=True)
        for _ in range(4):
            message = turn(family, random)
            thought = f"<think>\n{text(random)}\n</think>\n\n" if name == "qwen3" and random.random() < 0.5 else ""
            thought = f"{text(random)}\n</think>\n\n" if name == "qwen3.5" else thought
            said = said_by(family, message, thought=thought)
            after = follow_up(message, random)
            forms = [{"role": "assistant", "content": said}, message]
            suffix = template.suffix(messages, sent + said, forms, after)
            messages = [*messages, suffix.message, *after]
            num_turns += 1
            num_extended += suffix.extends
            whole = template.render(messages, add_generation_prompt=True)
            assert whole == sent + said + suffix.text if suffix.extends else whole.endswith(suffix.text)
            sent = whole
    assert (num_extended == num_turns) is not (family.rewrites or family.thinks)


TWO_RESULTS = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "", "tool_calls": [call(Random(1)), call(Random(2))]},
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "3 and 4."},
]


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "merged_results"])
def test_r02_results_in_a_row_are_one_suffix_and_r03_one_turn_of_the_user(name: str) -> None:
    tokenizer, chat = load(name), Chat(load(name))
    said = said_by(FAMILIES[name], TWO_RESULTS[1])
    sent = chat.render(TWO_RESULTS[:1], add_generation_prompt=True)
    suffix = chat.suffix(TWO_RESULTS[:1], sent + said, [TWO_RESULTS[1]], TWO_RESULTS[2:4])
    whole = chat.render(TWO_RESULTS[:4], add_generation_prompt=True)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (sent, said, suffix.text, whole)]
    assert np.concatenate(ids[:3]).tolist() == ids[3].tolist()
    shown = chat.render(TWO_RESULTS, add_generation_prompt=False)
    tokens, mask = conversation_tokens(tokenizer, TWO_RESULTS, mask_type=LossMaskType.QWEN3)
    assert tokens.tolist() == tokenizer.encode(shown, add_special_tokens=False).tolist()
    assert len(mask) == len(tokens)
    assert learned(tokenizer, tokens, mask)[0] == said


def test_a_thought_is_learned_where_it_is_shown_and_a_turn_that_is_shown_otherwise_is_refused() -> None:
    tokenizer = load("qwen3")
    thinking = {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nYes."}
    short = [{"role": "user", "content": "Is it?"}, thinking]
    tokens, mask = conversation_tokens(tokenizer, short)
    assert learned(tokenizer, tokens, mask) == [thinking["content"]]
    longer = [*short, {"role": "user", "content": "Why?"}, {**thinking, "content": "<think>\nSo.\n</think>\n\nThus."}]
    with pytest.raises(ConfigError, match=r"message 1: .* otherwise than it was said.* qwen3 .* distill_qwen"):
        conversation_tokens(tokenizer, longer)
    tokens, mask = conversation_tokens(tokenizer, longer, mask_type=LossMaskType.QWEN3)
    assert learned(tokenizer, tokens, mask) == ["Yes.", "<think>\nSo.\n</think>\n\nThus."]
    tokens, mask = conversation_tokens(tokenizer, longer, mask_type=LossMaskType.DISTILL_QWEN)
    assert learned(tokenizer, tokens, mask) == ["<think>\nSo.\n</think>\n\nThus."]


def test_an_opened_thought_is_not_learned() -> None:
    tokenizer = load("deepseek_r1")
    messages = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}]
    tokens, mask = conversation_tokens(tokenizer, messages, mask_type=LossMaskType.QWEN3)
    assert learned(tokenizer, tokens, mask) == ["Yes."]


def test_a_turn_is_silenced_and_a_conversation_of_silence_is_refused() -> None:
    tokenizer = load("chatml")
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1", "step_loss_mask": 0},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "2"},
    ]
    assert learned(tokenizer, *conversation_tokens(tokenizer, messages)) == ["2"]
    with pytest.raises(DataError, match="no turn of the assistant that is learned"):
        conversation_tokens(tokenizer, messages[:2])
    with pytest.raises(DataError, match="no turn of the assistant that is learned"):
        conversation_tokens(tokenizer, messages[:1])


def test_r10_a_rendered_conversation_begins_with_one_bos() -> None:
    tokenizer = load("llama3")
    tokens, _ = conversation_tokens(tokenizer, TWO_RESULTS[:1] + TWO_RESULTS[4:])
    bos = int(tokenizer.encode("<|begin_of_text|>", add_special_tokens=False)[0])
    assert (tokens == bos).sum() == 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("chatml", "turns end with <|im_end|>; earlier turns stay as they were said"),
        ("qwen3", "turns end with <|im_end|>; thoughts of earlier turns are left out"),
        ("llama3", "turns end with <|eot_id|>; white space at the end of turns is cut off"),
        ("glm4", "turns end with <|user|>; earlier turns stay as they were said"),
        ("counted", "turns end with <|end|>; what was sent before is rendered anew in each turn"),
        ("plain", "no token ends a turn; earlier turns stay as they were said"),
    ],
)
def test_what_a_template_keeps_is_told_in_a_line(name: str, told: str) -> None:
    assert audit_template(load(name)).describe() == told


def test_a_token_that_goes_beyond_the_turn_is_not_learned() -> None:
    tokenizer = load("plain")
    messages = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}]
    tokens, mask = conversation_tokens(tokenizer, messages)
    assert tokenizer.decode(tokens[-1:], skip_special_tokens=False) == ".\n\n"
    assert learned(tokenizer, tokens, mask, has_ends=False) == ["Yes"]


def test_a_thought_that_the_generation_prompt_closes_is_not_learned() -> None:
    tokenizer = load("qwen3")
    chat = Chat(tokenizer, template_kwargs={"enable_thinking": False})
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "2"},
    ]
    shown, turns = turns_of(chat, messages)
    assert shown.endswith("<think>\n\n</think>\n\n2<|im_end|>\n")
    assert [shown[span.start : span.end] for span in turns.values()] == ["1", "2"]


def test_what_follows_a_call_that_was_written_in_another_way() -> None:
    chat = Chat(load("mistral"))
    said = '[TOOL_CALLS][{"name":"add","arguments":{}}]'
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    forms = [{"role": "assistant", "content": said}, message]
    shown = chat.render(TWO_RESULTS[:1], add_generation_prompt=True) + said
    suffix = chat.suffix(TWO_RESULTS[:1], shown, forms, [{"role": "tool", "content": "3"}])
    assert (suffix.text, suffix.extends) == ('</s>[TOOL_RESULTS]{"content": "3"}[/TOOL_RESULTS]', False)


@pytest.mark.parametrize("mask_type", [LossMaskType.GENERIC, LossMaskType.QWEN3])
@pytest.mark.parametrize("name", FAMILIES)
def test_plain_turns_are_found_where_all_others_are(
    name: str, mask_type: LossMaskType, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, random = FAMILIES[name], Random(name)
    conversations = [conversation(family, random) for _ in range(8)]
    for messages in conversations[:4]:
        for message in messages:
            if message["role"] == "assistant" and isinstance(message["content"], str):
                message["content"] = random.choice(["<think>\nWell.\n</think>\n\n", " ", ""]) + message["content"]
                message["content"] += random.choice(["\n", "  ", ""])

    def found() -> list[Any]:
        results: list[Any] = []
        for messages in conversations:
            try:
                ids, mask = conversation_tokens(load(name), messages, mask_type=mask_type)
                results.append((ids.tolist(), mask.tolist()))
            except ConfigError as error:
                results.append(str(error))
        return results

    quick = found()
    monkeypatch.setattr("rollfeed.conversations.learned._PLAIN", frozenset())
    assert found() == quick

"""Histories of all kinds become samples in which every sampled token stands once, at the context it was sampled in."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.conversations.zoo.families import load

from rollfeed.conversations import Dialogue
from rollfeed.errors import ConfigError
from rollfeed.gateway.histories import read_history
from rollfeed.gateway.samples import samples_of, sift
from rollfeed.gateway.turn_tree import Opening, Turn, TurnTree
from rollfeed.protocols import OWN_CONTEXT, Matching, RewrittenTurns
from rollfeed.testing import CharTokenizer, make_prompt, make_request
from rollfeed.types import Completion, CompletionTimings, FinishKind, FinishReason, Message, Sample, VersionSpan

END = 3


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **others}


def call(name: str, arguments: Any, call_id: str = "call00000") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def completion_of(text: str, *, tokenizer: Any, end: int = END, version: int = 0) -> Completion:
    ids = np.append(tokenizer.encode(text, add_special_tokens=False), np.int32(end)).astype(np.int32)
    return Completion(
        token_ids=ids,
        logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
        text=text,
        finish_reason=FinishReason(FinishKind.STOP, end),
        version_spans=(VersionSpan(0, len(ids), version),),
        precision="fp32",
        prompt_tokens=1,
        cached_tokens=0,
        timings=CompletionTimings(0.0, 0.0),
    )


@dataclass
class Talk:
    """A session whose turns are given, not sampled."""

    matching: Matching = Matching.LENIENT
    rewritten: RewrittenTurns = RewrittenTurns.FORK
    tokenizer: Any = field(default_factory=CharTokenizer)
    end: int = END
    contexts: dict[int, NDArray[np.int32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tree = TurnTree(matching=self.matching, rewritten=self.rewritten)
        self.dialogue = Dialogue(self.tokenizer)
        self.openings: list[Opening] = []

    def ask(self, messages: list[Message], text: str = "", *, message: Message | None = None) -> Turn:
        opening = self.tree.open(read_history(messages, self.matching), self.dialogue)
        self.openings.append(opening)
        made = completion_of(text or f"said {len(self.tree.turns)}", tokenizer=self.tokenizer, end=self.end)
        turn = self.tree.add(opening, made, message or assistant(made.text), {}, number=len(self.openings))
        self.contexts[turn.number] = opening.token_ids
        return turn

    def samples(self) -> list[Sample]:
        kept = sift(self.tree.turns).kept
        request = make_request(make_prompt("?"), max_new_tokens=10, max_context_length=100)
        return samples_of(kept, request, {})

    def check(self) -> None:
        """Check that the tokens of every turn are trained once, at their context, or are of a turn that is dropped."""
        samples, sifted = self.samples(), sift(self.tree.turns)
        places: dict[bytes, list[tuple[int, int]]] = {}
        for index, sample in enumerate(samples):
            assert sample.metadata[OWN_CONTEXT]
            begin = sample.prompt_length
            edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask, [0]])))
            for start, end in edges.reshape(-1, 2).tolist():
                whole = sample.token_ids[: begin + end].tobytes()
                places.setdefault(whole, []).append((index, end - start))
        for turn in sifted.kept:
            ids = np.concatenate([self.contexts[turn.number], turn.completion.token_ids])
            assert np.array_equal(ids[: -len(turn.completion.token_ids)], turn.context_ids())
            found = places[ids.tobytes()].pop()
            assert found[1] == len(turn.completion.token_ids)
        assert not any(places.values())
        num_sampled = sum(len(turn.completion.token_ids) for turn in self.tree.turns)
        num_dropped = sum(len(turn.completion.token_ids) for turn in sifted.dropped)
        assert sum(int(sample.loss_mask.sum()) for sample in samples) + num_dropped == num_sampled


def test_a_history_that_goes_on_is_one_sample_with_all_of_its_turns() -> None:
    talk = Talk()
    talk.ask([user("a")], "one")
    talk.ask([user("a"), assistant("one"), user("b")], "two")
    (sample,) = talk.samples()
    assert "".join(map(chr, sample.token_ids)) == "user: a\nassistant: one\3\nuser: b\nassistant: two\3"
    trained = sample.response_token_ids[sample.loss_mask > 0]
    assert "".join(map(chr, trained)) == "one\3two\3"
    assert sample.logprobs[sample.loss_mask > 0].tolist() == [-1, -2, -3, -4] * 2
    talk.check()


def test_a_history_may_have_more_turns_than_calls_may_be_nested() -> None:
    talk = Talk()
    turns = [talk.ask([user("a")], "0")]
    for number in range(1, 2 * sys.getrecursionlimit()):
        last = turns[-1]
        following = replace(last, number=number, parent=last, goes_on=True, context=np.array([number], np.int32))
        turns.append(following)
    assert turns[-1].context_images() == ()
    assert turns[-1].context_ids()[-1] == len(turns) - 1


CHANGES = {
    "white space": assistant(" \n one two\n"),
    "parts": assistant([{"type": "text", "text": "one two"}]),  # type: ignore[arg-type]
    "a thought that is kept": assistant("one two", reasoning_content="Hm."),
    "a thought that is put into the text": assistant("<think>\nHm.\n</think>\n\none two"),
    "other ids of calls": assistant("one two", tool_calls=[call("look", {"a": 1, "b": [2.5]}, "other")]),
    "another order of arguments": assistant("one two", tool_calls=[call("look", {"b": [2.5], "a": 1})]),
    "arguments as text": assistant("one two", tool_calls=[call("look", '{"b": [2.5], "a": 1.0}')]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_harnesses_change_of_a_turn_is_the_turn_still_and_is_not_with_strict_matching(change: str) -> None:
    calls = [call("look", {"a": 1, "b": [2.5]})] if "tool_calls" in CHANGES[change] else []
    said = assistant("one two", **({"tool_calls": calls} if calls else {"reasoning_content": "Hm."}))
    is_same = change in ("a thought that is kept", "another order of arguments")
    for matching, goes_on in ((Matching.LENIENT, True), (Matching.STRICT, is_same)):
        talk = Talk(matching)
        talk.ask([user("a")], "one two", message=said)
        talk.ask([user("a"), CHANGES[change], user("b")])
        assert talk.openings[1].goes_on is goes_on
        assert talk.openings[1].is_fork is not talk.openings[1].goes_on
        talk.check()


@pytest.mark.parametrize(
    "turn",
    [
        assistant("one three"),
        assistant("one two", reasoning_content="Other."),
        assistant("one two", tool_calls=[call("look", {})]),
        assistant("<think>\nOther.\n</think>one two"),
    ],
    ids=["text", "thought", "call", "thought in the text"],
)
def test_a_turn_that_was_not_sampled_makes_a_fork_whose_sampled_tokens_count_as_lost(turn: dict[str, Any]) -> None:
    talk = Talk()
    talk.ask([user("a")], "zero")
    talk.ask([user("a"), assistant("zero"), user("b")], "one two", message=assistant("one two"))
    talk.ask([user("a"), assistant("zero"), user("b"), turn, user("c")])
    fork = talk.openings[2]
    assert fork.is_fork
    assert not fork.goes_on
    assert fork.num_lost_tokens == len("zero") + 1 + (len("one two") + 1 if "Other" in str(turn) else 0)
    assert len(talk.samples()) == 2
    talk.check()


def test_a_turn_that_the_harness_leaves_out_is_trained_in_a_sample_of_its_own() -> None:
    talk = Talk()
    talk.ask([user("a")], "one")
    talk.ask([user("a"), assistant("one"), user("b")], "bad form")
    talk.ask([user("a"), assistant("one"), user("b"), user("again")], "two")
    first, second = talk.samples()
    assert "".join(map(chr, second.response_token_ids)) == "two\3"
    assert "bad form" in "".join(map(chr, first.response_token_ids))
    assert not talk.openings[2].is_fork
    talk.check()


def test_another_system_prompt_or_a_summary_begins_another_root_and_no_fork() -> None:
    talk = Talk()
    talk.ask([{"role": "system", "content": "main"}, user("a")], "one")
    talk.ask([{"role": "system", "content": "sub"}, user("a")], "two")
    talk.ask([user("summary: one"), user("go on")], "three")
    assert [opening.is_fork for opening in talk.openings] == [False] * 3
    assert len(talk.samples()) == 3
    talk.check()


def test_of_several_completions_the_ones_that_were_gone_on_from_stay_or_else_the_last() -> None:
    talk = Talk()
    for text in ("one", "two", "three"):
        talk.ask([user("a")], text)
    assert [turn.completion.text for turn in sift(talk.tree.turns).kept] == ["three"]
    talk.ask([user("a"), assistant("two"), user("b")], "four")
    sifted = sift(talk.tree.turns)
    assert [turn.completion.text for turn in sifted.kept] == ["two", "four"]
    assert [turn.completion.text for turn in sifted.dropped] == ["one", "three"]
    talk.check()


def test_thoughts_that_a_template_leaves_out_make_a_context_of_its_own_or_are_kept_as_the_setting_says() -> None:
    tokenizer = load("qwen3")
    end = int(tokenizer.encode("<|im_end|>", add_special_tokens=False)[0])
    for rewritten, num_samples in ((RewrittenTurns.FORK, 2), (RewrittenTurns.APPEND, 1)):
        talk = Talk(rewritten=rewritten, tokenizer=tokenizer, end=end)
        said = assistant("yes", reasoning_content="Well.")
        talk.ask([user("a")], "<think>\nWell.\n</think>\n\nyes", message=said)
        talk.ask([user("a"), assistant("yes"), user("b")], "no")
        assert talk.openings[1].is_fork is (rewritten is RewrittenTurns.FORK)
        assert len(talk.samples()) == num_samples
        talk.check()


OPS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**32)), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(ops=OPS, strict=st.booleans())
def test_any_tree_of_histories_trains_every_token_once_at_its_context_or_drops_it(
    ops: list[tuple[int, int]], strict: bool
) -> None:
    talk = Talk(Matching.STRICT if strict else Matching.LENIENT)
    histories: list[list[Message]] = [[user("a")]]
    for kind, seed in ops:
        random = Random(seed)
        history = random.choice(histories)
        match kind:
            case 0:  # another root
                history = [{"role": "system", "content": str(seed)}, user("a")]
            case 1:  # a summary of what there was, perhaps with its last turns
                history = [user("summary"), *history[-random.randrange(3) :]]
            case 2:  # a turn that nobody sampled
                history = [*history, assistant("foreign"), user("b")]
            case 3:  # a turn left out
                history = [each for each in history if each["role"] != "assistant" or random.random() < 0.7]
            case 4:  # what harnesses do
                history = [{**each, "content": f" {each['content']}\n"} for each in history]
        if history[-1]["role"] == "assistant":
            history = [*history, user("go on")]
        turn = talk.ask(history, random.choice(["yes", "no", f"said {seed % 7}"]))
        histories += [[*history, turn.message, user(random.choice("bc"))], history]
    talk.check()


def test_a_context_that_would_be_rewritten_is_refused_where_that_is_asked_for() -> None:
    tokenizer = load("qwen3")
    end = int(tokenizer.encode("<|im_end|>", add_special_tokens=False)[0])
    talk = Talk(rewritten=RewrittenTurns.REFUSE, tokenizer=tokenizer, end=end)
    talk.ask([user("a")], "<think>\nWell.\n</think>\n\nyes", message=assistant("yes", reasoning_content="Well."))
    with pytest.raises(ConfigError, match=r"rollout\.rewritten_turns"):
        talk.ask([user("a"), assistant("yes"), user("b")])

"""Episodes with environments that answer back: exact tokens whatever the chat template does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.conversations.zoo.families import FAMILIES, load

from rollfeed.conversations import Conversation, FollowUp
from rollfeed.environments import EnvironmentRegistry
from rollfeed.environments.builtin.guess_number import GuessNumber
from rollfeed.errors import ConfigError, PluginError
from rollfeed.generate import default_generate, multi_turn
from rollfeed.prompts import ChatRenderer
from rollfeed.protocols import (
    MULTI_TURN,
    REWRITTEN_TURNS,
    Environment,
    EnvironmentStep,
    RewrittenTurns,
    Services,
    TurnJournal,
)
from rollfeed.testing import make_request
from rollfeed.types import (
    Completion,
    CompletionTimings,
    Correct,
    FinishKind,
    FinishReason,
    Prompt,
    Sample,
    SampleStatus,
    SamplingParams,
    Verdict,
    VersionSpan,
)

QUESTION = "What is the result?"


class Talk:
    """An environment that says something for a number of turns, and is content then."""

    environment_id = "my/talk"
    version = 1
    summary = "talks"
    max_level = 0

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        raise NotImplementedError

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        raise NotImplementedError

    def start(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**params, "heard": []}

    def step(self, state: Mapping[str, Any], response: str) -> EnvironmentStep:
        heard = [*state["heard"], response]
        if len(heard) == state["num_turns"]:
            return EnvironmentStep(verdict=Verdict(reward=0.5, correct=Correct.YES))
        messages = [{"role": "user", "content": each.format(heard=len(heard))} for each in state["says"]]
        return EnvironmentStep(state={**state, "heard": heard}, messages=tuple(messages))

    def give_up(self, state: Mapping[str, Any]) -> Verdict:
        return Verdict(reward=-1.0, correct=Correct.NO)


class Echo:
    """An endpoint that gives prepared turns, each as it is, and records what it was sent."""

    policy_version = 3

    def __init__(self, turns: list[NDArray[np.int32]], kinds: list[FinishKind] | None = None) -> None:
        self.turns = turns
        self.kinds = kinds or [FinishKind.STOP] * len(turns)
        self.sent: list[NDArray[np.int32]] = []
        self.params: list[SamplingParams] = []

    async def generate(self, token_ids: NDArray[np.int32], params: SamplingParams, **_: Any) -> Completion:
        number = len(self.sent)
        self.sent.append(token_ids)
        self.params.append(params)
        ids = self.turns[number][: params.max_new_tokens]
        kind = self.kinds[number] if len(ids) == len(self.turns[number]) else FinishKind.LENGTH
        return Completion(
            token_ids=ids,
            logprobs=np.linspace(-2.0, -1.0, len(ids), dtype=np.float32),
            version_spans=(VersionSpan(0, len(ids), self.policy_version),) if len(ids) else (),
            finish_reason=FinishReason(kind),
            text=f"turn {number}",
            precision="fp32",
            prompt_tokens=len(token_ids),
            cached_tokens=0,
            timings=CompletionTimings(0.0, 0.0),
        )


def turn_of(name: str, text: str, random: Random, *, ending: str | None = None) -> NDArray[np.int32]:
    """Return a turn as it may be sampled: each character by itself, as no tokenizer would write it, and its end."""
    tokenizer = load(name)
    pieces = [tokenizer.encode(each, add_special_tokens=False) for each in (text if random.random() < 0.7 else [text])]
    end = tokenizer.encode(ending or FAMILIES[name].ends[0], add_special_tokens=False)
    return np.concatenate([*pieces, end])


async def play(
    name: str,
    endpoint: Echo,
    *,
    says: list[str],
    num_turns: int,
    budget: int = 4000,
    context: int = 8000,
    journal: TurnJournal | None = None,
    rewritten: RewrittenTurns = RewrittenTurns.FORK,
    environment: Environment | None = None,
) -> list[Sample]:
    tokenizer = load(name)
    text, ids, *_ = ChatRenderer(tokenizer, rollout_max_prompt_len=None).render(QUESTION, apply_chat_template=True)
    prompt = Prompt(
        prompt_id="a",
        source="talk",
        text=text,
        token_ids=ids,
        messages=({"role": "user", "content": QUESTION},),
        metadata={
            "environment": Talk.environment_id,
            "params": {"num_turns": num_turns, "says": says},
            MULTI_TURN: True,
        },
    )
    request = make_request(prompt, max_new_tokens=budget, max_context_length=context)
    services = Services(
        endpoint=endpoint,
        tokenizer=tokenizer,
        default=default_generate,
        environments=EnvironmentRegistry([environment or Talk()]),
        journal=journal or TurnJournal(),
        rewritten_turns=rewritten,
    )
    return list(await default_generate(request, services=services))


def check_exact(samples: list[Sample], endpoint: Echo, turns: list[NDArray[np.int32]]) -> None:
    """Check that what is trained is what was sampled, each token once and in its own context."""
    masks = [np.zeros(len(sample.token_ids)) for sample in samples]
    logprobs = [np.zeros(len(sample.token_ids), np.float32) for sample in samples]
    place = 0
    for sent, turn in zip(endpoint.sent, turns, strict=True):
        shown = np.concatenate([sent, turn])
        if samples[place].token_ids[: len(shown)].tolist() != shown.tolist():
            place += 1  # what was sent before is no prefix: a fork
        assert samples[place].token_ids[: len(shown)].tolist() == shown.tolist()
        masks[place][len(sent) : len(shown)] = 1.0
        logprobs[place][len(sent) : len(shown)] = np.linspace(-2.0, -1.0, len(turn), dtype=np.float32)
    assert place == len(samples) - 1
    for sample, mask, expected in zip(samples, masks, logprobs, strict=True):
        assert sample.loss_mask.tolist() == mask[sample.prompt_length :].tolist()
        assert mask[: sample.prompt_length].sum() == 0
        assert sample.logprobs.tolist() == expected[sample.prompt_length :].tolist()
    assert sum(sample.loss_mask.sum() for sample in samples) == sum(map(len, turns))


class InParts(Talk):
    """Says the same in parts, all of them text."""

    def step(self, state: Mapping[str, Any], response: str) -> EnvironmentStep:
        step = super().step(state, response)
        told = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in step.messages]
        return replace(step, messages=tuple(told))


async def test_parts_that_are_text_need_nothing_that_sees() -> None:
    turns = [turn_of("chatml", said, Random(0)) for said in ("yes", "no")]
    whole, in_parts = Echo(turns), Echo(turns)
    await play("chatml", whole, says=["Sure?"], num_turns=2)
    await play("chatml", in_parts, says=["Sure?"], num_turns=2, environment=InParts())
    assert [ids.tolist() for ids in in_parts.sent] == [ids.tolist() for ids in whole.sent]


async def test_a_fork_has_the_context_that_the_template_shows() -> None:
    tokenizer, thought = load("qwen3"), "<think>\nWell.\n</think>\n\n"
    turns = [turn_of("qwen3", f"{thought}{said}", Random(0)) for said in ("yes", "no", "yes")]
    endpoint = Echo(turns)
    samples = await play("qwen3", endpoint, says=["Sure?"], num_turns=3)
    said = [("user", QUESTION), ("assistant", "yes"), ("user", "Sure?"), ("assistant", "no"), ("user", "Sure?")]
    messages = [{"role": role, "content": content} for role, content in said]
    for number, (sample, sent) in enumerate(zip(samples, endpoint.sent, strict=True)):
        assert tokenizer.decode(sent, skip_special_tokens=False) == tokenizer.render_chat(messages[: 1 + 2 * number])
        assert sample.token_ids[: sample.prompt_length].tolist() == sent.tolist()
        assert sample.response == f"turn {number}"
    assert samples[-1].metadata[REWRITTEN_TURNS] == 2


async def test_a_rewritten_turn_fails_the_rollout_where_it_is_refused() -> None:
    turns = [turn_of("qwen3", "<think>\nWell.\n</think>\n\nyes", Random(0)) for _ in range(2)]
    with pytest.raises(ConfigError, match=r"turn 1: .* set rollout\.rewritten_turns to fork"):
        await play("qwen3", Echo(turns), says=["Sure?"], num_turns=2, rewritten=RewrittenTurns.REFUSE)
    (sample,) = await play("chatml", Echo(turns), says=["Sure?"], num_turns=2, rewritten=RewrittenTurns.REFUSE)
    assert sample.status is SampleStatus.COMPLETED


async def test_forks_share_the_budget_and_an_aborted_one_is_gone_on_with_from_the_journal() -> None:
    thought = "<think>\nWell.\n</think>\n\n"
    turns = [turn_of("qwen3", f"{thought}{said}", Random(0)) for said in ("yes", "no", "yes")]
    journal = TurnJournal()
    aborted = Echo([turns[0], turns[1][:3]], [FinishKind.STOP, FinishKind.ABORT])
    first = await play("qwen3", aborted, says=["Sure?"], num_turns=3, journal=journal)
    assert [sample.status for sample in first] == [SampleStatus.COMPLETED, SampleStatus.ABORTED]
    rest = Echo([turns[1][3:], turns[2]])
    samples = await play("qwen3", rest, says=["Sure?"], num_turns=3, journal=journal)
    whole = Echo(turns)
    expected = await play("qwen3", whole, says=["Sure?"], num_turns=3)
    assert [each.token_ids.tolist() for each in samples] == [each.token_ids.tolist() for each in expected]
    assert [each.loss_mask.tolist() for each in samples] == [each.loss_mask.tolist() for each in expected]
    spent = [4000 - params.max_new_tokens for params in whole.params]
    assert spent == [0, len(turns[0]), len(turns[0]) + len(turns[1])]


@pytest.mark.parametrize("name", ["chatml", "qwen2.5", "llama3", "glm4", "phi", "merged_results", "numbered"])
async def test_what_is_sent_is_the_full_render_where_the_template_keeps_turns(name: str) -> None:
    tokenizer = load(name)
    endpoint = Echo([turn_of(name, said, Random(0)) for said in ("yes", "no", "yes")])
    await play(name, endpoint, says=["Sure?"], num_turns=3)
    said = [("user", QUESTION), ("assistant", "yes"), ("user", "Sure?"), ("assistant", "no"), ("user", "Sure?")]
    messages = [{"role": role, "content": content} for role, content in said]
    for number, sent in enumerate(endpoint.sent):
        whole = tokenizer.render_chat(messages[: 1 + 2 * number])
        assert tokenizer.decode(sent, skip_special_tokens=False) == whole


async def test_a_stop_token_that_opens_the_next_turn_counts_once() -> None:
    turns = [turn_of("glm4", "yes", Random(0), ending="<|user|>"), turn_of("glm4", "no", Random(0))]
    endpoint = Echo(turns)
    await play("glm4", endpoint, says=["Sure?"], num_turns=2)
    opening = load("glm4").encode("<|user|>", add_special_tokens=False)[0]
    assert (endpoint.sent[1] == opening).sum() == 2  # the question's, and the one that was sampled


async def test_r15_what_is_told_counts_within_the_context_and_the_budget() -> None:
    turn = turn_of("chatml", "yes", Random(0))
    for limits in ({"context": 80}, {"budget": 40}):
        endpoint = Echo([turn] * 20)
        (sample,) = await play("chatml", endpoint, says=["No, not at all."], num_turns=20, **limits)
        assert (sample.status, sample.reward) == (SampleStatus.TRUNCATED, -1.0)
        assert len(sample.token_ids) <= 80 if "context" in limits else sample.response_length <= 40
        assert all(params.max_new_tokens >= 1 for params in endpoint.params)
        assert sample.loss_mask[-1] == 1.0


async def test_a_turn_that_is_cut_off_ends_the_episode() -> None:
    long = turn_of("chatml", "yes " * 30, Random(0))
    (sample,) = await play("chatml", Echo([long]), says=["?"], num_turns=3, budget=10)
    assert (sample.status, sample.response_length, sample.reward) == (SampleStatus.TRUNCATED, 10, -1.0)


async def test_r08_r19_an_aborted_turn_leaves_an_aborted_sample_without_a_reward() -> None:
    turn = turn_of("chatml", "yes", Random(0))
    for part in (turn[:1], turn[:0]):
        endpoint = Echo([turn, part], [FinishKind.STOP, FinishKind.ABORT])
        (sample,) = await play("chatml", endpoint, says=["?"], num_turns=3)
        assert (sample.status, sample.reward) == (SampleStatus.ABORTED, None)
        assert len(sample.logprobs) == len(sample.loss_mask) == sample.response_length
        assert sample.loss_mask.sum() == len(turn) + len(part)


async def test_a_turn_that_was_resumed_is_told_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    turn, heard = turn_of("chatml", "yes", Random(0)), []
    follow_up = Conversation.follow_up

    def listen(self: Conversation, said: NDArray[np.int32], messages: Any, **forms: Any) -> FollowUp:
        heard.append(said.tolist())
        return follow_up(self, said, messages, **forms)

    monkeypatch.setattr(Conversation, "follow_up", listen)
    journal = TurnJournal()
    aborted = Echo([turn[:2]], [FinishKind.ABORT])
    (sample,) = await play("chatml", aborted, says=["?"], num_turns=2, journal=journal)
    assert sample.status is SampleStatus.ABORTED
    resumed = Echo([turn[2:], turn])
    (sample,) = await play("chatml", resumed, says=["?"], num_turns=2, journal=journal)
    assert sample.status is SampleStatus.COMPLETED
    assert heard == [turn.tolist()]


async def test_without_a_template_contents_are_appended_as_they_are() -> None:
    tokenizer = load("plain")
    ids = tokenizer.encode("1-4?", add_special_tokens=False)
    prompt = Prompt(
        prompt_id="a",
        source="s",
        text="1-4?",
        token_ids=ids,
        metadata={
            "environment": "core/guess_number",
            "params": {"number": 3, "max_turns": 3, "style": "compact"},
            MULTI_TURN: True,
        },
    )
    two, three = (np.concatenate([tokenizer.encode(each, add_special_tokens=False), [0]]) for each in "23")
    endpoint = Echo([two.astype(np.int32), three.astype(np.int32)])
    endpoint_texts = iter(["2", "3"])
    generate = endpoint.generate

    async def said(*arguments: Any, **named: Any) -> Completion:
        return replace(await generate(*arguments, **named), text=next(endpoint_texts))

    endpoint.generate = said  # type: ignore[method-assign]
    unseeded = SamplingParams(max_new_tokens=40, seed=None)
    request = make_request(prompt, max_new_tokens=40, max_context_length=100, params=unseeded)
    services = Services(
        endpoint=endpoint,
        tokenizer=tokenizer,
        default=default_generate,
        environments=EnvironmentRegistry([GuessNumber()]),
    )
    (sample,) = await multi_turn(request, services=services)
    assert tokenizer.decode(sample.token_ids, skip_special_tokens=True) == "1-4?2>3"
    assert sample.reward == pytest.approx(2 / 3)
    assert endpoint.params[1].seed is None
    once = replace(prompt, metadata={**prompt.metadata, "environment": "core/add_numbers"})
    with pytest.raises(PluginError, match="core/add_numbers: it has no start, step and give_up"):
        await multi_turn(replace(request, prompt=once), services=replace(services, environments=EnvironmentRegistry()))

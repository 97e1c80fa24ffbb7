"""Episodes without a run around them: samples of exactly what was sent and sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.conversations.zoo.families import FAMILIES, load

from rollfeed import Endpoint, agent_rollout_to_sample, generate_rollout_batch
from rollfeed.errors import ConfigError
from rollfeed.generate import default_generate
from rollfeed.plugins import load_plugin
from rollfeed.prompts import ChatRenderer
from rollfeed.protocols import EnvironmentStep, GenerateFn, Services
from rollfeed.testing import make_request
from rollfeed.tools.calculator import Calculator
from rollfeed.types import (
    Completion,
    CompletionTimings,
    Correct,
    FinishKind,
    FinishReason,
    Prompt,
    SampleStatus,
    SamplingParams,
    Verdict,
    VersionSpan,
)

NAME = "qwen2.5"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "5 + 3"}}\n</tool_call>'


class Script:
    """An endpoint that says prepared turns in order, whoever asks, and records what it was sent."""

    policy_version = 2
    context_length = 4000
    precision = "fp32"

    def __init__(self, *turns: str) -> None:
        self.turns = list(turns)
        self.sent: list[NDArray[np.int32]] = []

    async def generate(self, token_ids: NDArray[np.int32], params: SamplingParams, **_: Any) -> Completion:
        self.sent.append(token_ids)
        text = self.turns[min(len(self.sent), len(self.turns)) - 1]
        ids = load(NAME).encode(text + FAMILIES[NAME].ends[0], add_special_tokens=False)[: params.max_new_tokens]
        return Completion(
            token_ids=ids,
            logprobs=np.linspace(-2.0, -1.0, len(ids), dtype=np.float32),
            text=text,
            finish_reason=FinishReason(FinishKind.STOP),
            version_spans=(VersionSpan(0, len(ids), 2),),
            precision=self.precision,
            prompt_tokens=len(token_ids),
            cached_tokens=0,
            timings=CompletionTimings(0.0, 0.0),
        )


class CalculatorEnvironment:
    """A question with a number as its answer, and a tool."""

    tools = (Calculator(),)

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        right = response.endswith(str(params["answer"]))
        return Verdict(reward=float(right), correct=Correct.YES if right else Correct.NO)


class Persistent:
    """Asks again until it hears a yes."""

    environment_id = "my/persistent"
    version, summary, max_level = 1, "asks again", 0

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        raise NotImplementedError

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        raise NotImplementedError

    def start(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        return params

    def step(self, state: Mapping[str, Any], response: str) -> EnvironmentStep:
        if response == "yes":
            return EnvironmentStep(verdict=Verdict(reward=1.0, correct=Correct.YES))
        return EnvironmentStep(messages=({"role": "user", "content": "Sure?"},))

    def give_up(self, state: Mapping[str, Any]) -> Verdict:
        return Verdict(reward=-1.0, correct=Correct.NO)


async def test_tools_are_called_and_only_what_was_sampled_is_trained_on() -> None:
    endpoint = Script(CALL, "It is 8")
    sample = await agent_rollout_to_sample(
        prompt="What is 5 + 3?",
        environment_cls=CalculatorEnvironment,
        endpoint=endpoint,
        tokenizer=load(NAME),
        max_turns=5,
        metadata={"params": {"answer": 8}, "row": 7},
    )
    assert (sample.status, sample.reward, sample.correct) == (SampleStatus.COMPLETED, 1.0, Correct.YES)
    assert sample.metadata["row"] == 7
    assert '"name": "calculator"' in load(NAME).decode(endpoint.sent[0], skip_special_tokens=False)
    roles = [message["role"] for message in sample.metadata["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert "8" in sample.metadata["messages"][2]["content"]
    mask = np.zeros(len(sample.token_ids))
    for sent, text in zip(endpoint.sent, endpoint.turns, strict=True):
        turn = load(NAME).encode(text + FAMILIES[NAME].ends[0], add_special_tokens=False)
        assert sample.token_ids[: len(sent)].tolist() == sent.tolist()
        mask[len(sent) : len(sent) + len(turn)] = 1.0
    assert sample.loss_mask.tolist() == mask[sample.prompt_length :].tolist()


async def test_an_environment_answers_back_until_the_turns_are_used_up() -> None:
    given: dict[str, Any] = {"endpoint": Script("no"), "tokenizer": load(NAME), "environment": Persistent()}
    sample = await agent_rollout_to_sample("Is it?", max_turns=3, **given)
    assert len(given["endpoint"].sent) == 3
    assert (sample.status, sample.reward) == (SampleStatus.TRUNCATED, -1.0)
    said = await agent_rollout_to_sample("Is it?", **{**given, "endpoint": Script("no", "yes")})
    assert (said.status, said.reward) == (SampleStatus.COMPLETED, 1.0)


@pytest.mark.parametrize("environment_cls", [None, CalculatorEnvironment])
async def test_a_finished_sample_goes_on_with_its_tokens_kept(environment_cls: type | None) -> None:
    given: dict[str, Any] = {
        "environment_cls": environment_cls,
        "tokenizer": load(NAME),
        "metadata": {"params": {"answer": 8}},
    }
    first = await agent_rollout_to_sample("What is 5 + 3?", endpoint=Script("It is 8"), **given)
    endpoint = Script("Yes, 8")
    told = [{"role": "user", "content": "Sure?"}]
    second = await agent_rollout_to_sample(first, messages=told, endpoint=endpoint, **given)
    assert second.token_ids[: len(first.token_ids)].tolist() == first.token_ids.tolist()
    assert second.loss_mask[: first.response_length].tolist() == first.loss_mask.tolist()
    assert second.logprobs[: first.response_length].tolist() == first.logprobs.tolist()
    turn = load(NAME).encode("Yes, 8" + FAMILIES[NAME].ends[0], add_special_tokens=False)
    assert second.loss_mask.sum() == first.loss_mask.sum() + len(turn)
    assert second.token_ids[: len(endpoint.sent[0])].tolist() == endpoint.sent[0].tolist()
    messages = [
        {"role": "user", "content": "What is 5 + 3?"},
        {"role": "assistant", "content": "It is 8"},
        *told,
    ]
    assert second.metadata["messages"] == [*messages, {"role": "assistant", "content": "Yes, 8"}]
    tools = None if environment_cls is None else json.loads(json.dumps([definition()]))
    shown = load(NAME).render_chat(messages, tools=tools)
    assert load(NAME).decode(endpoint.sent[0], skip_special_tokens=False) == shown
    with pytest.raises(ConfigError, match="cannot be gone on with: it needs messages to be told"):
        await agent_rollout_to_sample(first, endpoint=endpoint, **given)


def definition() -> dict[str, Any]:
    tool = Calculator()
    about = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": about}


async def test_what_goes_on_keeps_what_is_known_of_the_first_part_and_has_the_whole_budget() -> None:
    params = SamplingParams(max_new_tokens=4, seed=1)
    given: dict[str, Any] = {"tokenizer": load(NAME), "params": params}
    first = await agent_rollout_to_sample("a", endpoint=Script("It is 8, yes"), **given)
    assert first.response_length == 4
    endpoint = Script("It is 9, no")
    endpoint.precision = "int8"
    told = [{"role": "user", "content": "Sure?"}]
    second = await agent_rollout_to_sample(first, messages=told, endpoint=endpoint, **given)
    assert (second.loss_mask.sum(), second.precision) == (8, "fp32+int8")
    assert second.prompt_length == first.prompt_length


async def test_a_batch_is_in_the_order_of_its_prompts() -> None:
    given: dict[str, Any] = {
        "endpoint": Script("It is 8"),
        "tokenizer": load(NAME),
        "environment_cls": CalculatorEnvironment,
    }
    about: list[dict[str, Any]] = [{"params": {"answer": answer}} for answer in (8, 9, 8)]
    samples = await generate_rollout_batch(["a", "b", [{"role": "user", "content": "c"}]], metadata_list=about, **given)
    assert [sample.reward for sample in samples] == [1.0, 0.0, 1.0]
    assert [sample.rollout_id for sample in samples] == [0, 1, 2]
    assert [sample.metadata["messages"][0]["content"] for sample in samples] == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="metadata_list has 1 entries for 2 prompts"):
        await generate_rollout_batch(["a", "b"], metadata_list=[{}], **given)


async def test_a_partial_is_a_generate_function() -> None:
    generate = load_plugin(
        partial(generate_rollout_batch, environment_cls=CalculatorEnvironment, max_turns=4),
        GenerateFn,
        key="plugins.generate",
    )
    shown = ChatRenderer(load(NAME), rollout_max_prompt_len=None).render("What is 5 + 3?", apply_chat_template=True)
    prompt = Prompt(
        prompt_id="a",
        source="s",
        text=shown.text,
        token_ids=shown.token_ids,
        messages=({"role": "user", "content": "What is 5 + 3?"},),
        metadata={"params": {"answer": 8}},
    )
    place = {"group_index": 3, "index": 25, "rollout_id": 25, "step": 1}
    request = make_request(prompt, max_new_tokens=500, max_context_length=2000, **place)
    endpoint = Script(CALL, "It is 8")
    endpoint.context_length = None  # type: ignore[assignment]  # as of what a run gives
    services = Services(endpoint=endpoint, tokenizer=load(NAME), default=default_generate)
    (sample,) = await generate(request, services=services)
    assert (sample.reward, sample.group_index, sample.rollout_id, sample.index) == (1.0, 3, 25, 25)
    assert sample.metadata["own_context"] is True
    # What an episode has done stands in the run's journal.
    again = await generate(request, services=services)
    assert len(endpoint.sent) == 2
    assert again[0].to_dict() == sample.to_dict()


async def test_an_embedded_model_answers_behind_an_endpoint(tiny_checkpoint: Any) -> None:
    endpoint = Endpoint(model=str(tiny_checkpoint), context_length=64)
    params = SamplingParams(max_new_tokens=4, seed=1)
    async with endpoint:
        one = await agent_rollout_to_sample("Hello", endpoint=endpoint, params=params)
        two = await agent_rollout_to_sample("Hello", endpoint=endpoint, params=params)
    assert one.token_ids.tolist() == two.token_ids.tolist()
    assert 1 <= one.response_length <= 4
    alone = await agent_rollout_to_sample("Hello", endpoint=endpoint, params=params)
    assert alone.token_ids.tolist() == one.token_ids.tolist()


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"provider": "tgi", "api_base": "http://127.0.0.1:1"}, "there is no provider 'tgi'"),
        ({"provider": "sglang"}, "provider 'sglang' needs api_base"),
        ({"api_base": "http://127.0.0.1:1"}, "the embedded engine has no address"),
    ],
)
def test_an_endpoint_that_cannot_be_is_refused(about: dict[str, Any], said: str, tiny_checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match=said):
        Endpoint(model=str(tiny_checkpoint), **about)


async def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="endpoint is missing"):
        await agent_rollout_to_sample("a")
    with pytest.raises(ConfigError, match="tokenizer is missing"):
        await agent_rollout_to_sample("a", endpoint=Script("b"))
    unbounded = Script("b")
    unbounded.context_length = None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="params are missing"):
        await agent_rollout_to_sample("a", endpoint=unbounded, tokenizer=load(NAME))
    with pytest.raises(ConfigError, match="max_turns = 0"):
        await agent_rollout_to_sample("a", endpoint=Script("b"), tokenizer=load(NAME), max_turns=0)

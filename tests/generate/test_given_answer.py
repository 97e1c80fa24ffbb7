"""Answers that a data set brings: over all chat templates, what is learned of a full render is the sample."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.conversations.test_turns import conversation
from tests.conversations.zoo.families import FAMILIES, load

from rollfeed import RolloutConfig, open_rollouts
from rollfeed.conversations import LossMaskType, answered_prompt, conversation_tokens
from rollfeed.errors import DataError
from rollfeed.generate import given_answer
from rollfeed.protocols import RolloutRequest, Services
from rollfeed.testing import CharTokenizer, ListSource, ScriptedEngine
from rollfeed.types import Prompt, Sample, SampleStatus, SamplingParams, VersionSpan


class TokenEndpoint:
    policy_version = 7

    async def generate(self, *arguments: object, **others: object) -> Any:
        raise AssertionError("nothing is sampled")


def prompt_of(messages: list[dict[str, Any]] | None, *, text: str = "", label: Any = None) -> Prompt:
    ids: NDArray[np.int32] = CharTokenizer().encode(text, add_special_tokens=False)
    shown = None if messages is None else tuple(messages)
    return Prompt(prompt_id="talks/0", source="talks", text=text, token_ids=ids, messages=shown, label=label)


async def sample_of(prompt: Prompt, tokenizer: Any, mask_type: LossMaskType = LossMaskType.QWEN3) -> Sample:
    request = RolloutRequest(
        prompt=answered_prompt(prompt, tokenizer=tokenizer, mask_type=mask_type).prompt,
        params=SamplingParams(max_new_tokens=4),
        group_index=2,
        index=5,
        rollout_id=5,
        step=1,
        max_context_length=64,
    )
    services = Services(endpoint=TokenEndpoint(), tokenizer=tokenizer, default=given_answer)
    (sample,) = await given_answer(request, services=services, mask_type=mask_type)
    assert (sample.token_ids[: len(request.prompt.token_ids)] == request.prompt.token_ids).all()
    assert sample.prompt_length == len(request.prompt.token_ids)
    return sample


@pytest.mark.parametrize("num_conversations", [10, pytest.param(1500, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", FAMILIES)
async def test_r05_the_sample_is_the_full_render_and_its_mask_begins_with_the_response(
    name: str, num_conversations: int
) -> None:
    random, tokenizer = Random(name), load(name)
    for _ in range(num_conversations):
        messages = conversation(FAMILIES[name], random)
        ids, mask = conversation_tokens(tokenizer, messages, mask_type=LossMaskType.QWEN3)
        sample = await sample_of(prompt_of(messages), tokenizer)
        assert sample.token_ids.tolist() == ids.tolist()
        assert np.concatenate([np.zeros(sample.prompt_length), sample.loss_mask]).tolist() == mask.tolist()
        assert sample.loss_mask[0] == 1.0
        assert not sample.logprobs.any()
        assert sample.version_spans == (VersionSpan(0, sample.response_length, 7),)
        assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, 0.0)


async def test_a_label_is_the_last_turn_of_a_conversation_without_one() -> None:
    tokenizer = load("chatml")
    question = [{"role": "user", "content": "Is it?"}]
    answered = [*question, {"role": "assistant", "content": "Yes."}]
    samples = [
        await sample_of(prompt, tokenizer) for prompt in (prompt_of(question, label="Yes."), prompt_of(answered))
    ]
    assert samples[0].token_ids.tolist() == samples[1].token_ids.tolist()
    assert samples[0].loss_mask.tolist() == samples[1].loss_mask.tolist()
    assert samples[0].response.startswith("Yes.<|im_end|>")


async def test_a_text_is_followed_by_its_label_and_the_token_that_ends_it() -> None:
    tokenizer = CharTokenizer()
    sample = await sample_of(prompt_of(None, text="2 + 2 = ", label="4"), tokenizer)
    assert sample.token_ids.tolist() == [*map(ord, "2 + 2 = 4"), 3]
    assert sample.loss_mask.tolist() == [1.0, 1.0]


async def test_a_manager_makes_batches_of_given_answers_and_asks_its_engine_nothing() -> None:
    config = RolloutConfig(rollout={"mode": "sft", "rollout_batch_size": 2})
    source, engine = ListSource(["1 + 1 = ", "1 + 2 = "], labels=["2", "3"]), ScriptedEngine()
    async with open_rollouts(config, source=source, engine=engine, tokenizer=CharTokenizer()) as rollouts:
        batch = await rollouts.generate_batch()
    assert [sample.response for sample in batch.samples] == ["2\x03", "3\x03"]
    assert batch.advantages_S.tolist() == [1.0, 1.0]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (prompt_of([{"role": "user", "content": "Is it?"}]), "no turn of the assistant that is learned"),
        (prompt_of(None, text="2 + 2 = "), "no label to teach, which is a text"),
        (prompt_of(None, text="2 + 2 = ", label=4), "no label to teach, which is a text"),
    ],
)
def test_what_has_no_answer_is_refused(prompt: Prompt, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        answered_prompt(prompt, tokenizer=load("chatml"), mask_type=LossMaskType.GENERIC)


def test_an_answer_to_nothing_is_refused() -> None:
    prompt = prompt_of([{"role": "assistant", "content": "Yes."}])
    with pytest.raises(DataError, match="nothing comes before it"):
        answered_prompt(prompt, tokenizer=load("plain"), mask_type=LossMaskType.GENERIC)


def test_what_is_learned_of_a_prompt_is_learned_of_it_again() -> None:
    tokenizer, prompt = load("chatml"), prompt_of([{"role": "user", "content": "Is it?"}], label="Yes.")
    first = answered_prompt(prompt, tokenizer=tokenizer, mask_type=LossMaskType.GENERIC)
    again = answered_prompt(replace(first.prompt), tokenizer=tokenizer, mask_type=LossMaskType.GENERIC)
    assert again.prompt == replace(first.prompt, token_ids=again.prompt.token_ids)
    assert again.token_ids.tolist() == first.token_ids.tolist()

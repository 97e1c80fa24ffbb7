"""Arguments hold for the call that they are given in, and those of the run say all that its settings say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfeed.compat.slime_plugins.names.slime_sample import Sample
from rollfeed.compat.slime_plugins.read_back import own_sample
from rollfeed.compat.slime_plugins.shared_run import Sent
from rollfeed.testing import ScriptedEngine, make_prompt, make_request
from rollfeed.types import (
    Completion,
    CompletionTimings,
    FinishKind,
    FinishReason,
    RoutedExperts,
    SamplingMask,
    SamplingParams,
    VersionSpan,
)

WriteText = Callable[[str], Path]
STRICT = {"failure_minimum": 1, "failure_budget": 0.0}
"""Of ``[rollout]``: what a plug-in asserts ends the run."""


async def test_r47_each_call_of_a_generate_function_is_answered_by_its_own_arguments(
    write_plugins: WriteText, make_batches: Callable[..., Any]
) -> None:
    """R47: the second request uses the second length, whoever asked first."""
    text = (
        "import copy\n"
        "from slime.rollout.sglang_rollout import GenerateState, generate\n"
        "async def f(args, sample, sampling_params):\n"
        "    assert GenerateState(args).sampling_params['max_new_tokens'] == 8\n"
        "    own = copy.copy(args)\n"
        "    own.rollout_max_response_len = 2 + sample.index % 4\n"
        "    return await generate(own, sample, GenerateState(own).sampling_params)\n"
    )
    engine = ScriptedEngine(answer=lambda request: "9" * 20)
    (batch,) = await make_batches(
        1,
        folder=write_plugins(text),
        engine=engine,
        generate="slime:mine.f",
        reward_fn=lambda sample, prompt: 1.0,
        rollout=STRICT,
    )
    assert [sample.response_length for sample in batch.samples] == [2, 3, 4, 5] * 3
    assert sorted(request.params.max_new_tokens for request in engine.requests) == sorted([2, 3, 4, 5] * 3)


async def test_r47_a_step_is_answered_by_the_arguments_that_its_rollout_function_passes_on(
    write_plugins: WriteText, make_batches: Callable[..., Any]
) -> None:
    text = (
        "import copy\n"
        "from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group\n"
        "async def f(args, rollout_id, data_source, evaluation=False):\n"
        "    own = copy.copy(args)\n"
        "    own.rollout_max_response_len = 3 + rollout_id\n"
        "    params, groups = GenerateState(own).sampling_params, data_source(args.rollout_batch_size)\n"
        "    return [await generate_and_rm_group(own, group, params) for group in groups]\n"
    )
    batches = await make_batches(
        2,
        folder=write_plugins(text),
        engine=ScriptedEngine(answer=lambda request: "9" * 20),
        rollout_fn="slime:mine.f",
        reward={"rm_type": "random"},
    )
    assert [{sample.response_length for sample in batch.samples} for batch in batches] == [{3}, {4}]


async def test_what_a_step_has_submitted_is_known_whatever_arguments_are_asked_with(
    write_plugins: WriteText, make_batches: Callable[..., Any]
) -> None:
    text = (
        "import copy\n"
        "from slime.rollout.sglang_rollout import GenerateState, generate_rollout\n"
        "def f(args, rollout_id, data_source, evaluation=False):\n"
        "    state, other = GenerateState(args), GenerateState(copy.copy(args))\n"
        "    assert GenerateState(args) is state and other is not state\n"
        "    other.remaining_batch_size += 2\n"
        "    other.noted = rollout_id\n"
        "    assert (state.remaining_batch_size, state.noted) == (2, rollout_id)\n"
        "    return generate_rollout(args, rollout_id, data_source)\n"
    )
    batches = await make_batches(
        2, folder=write_plugins(text), rollout_fn="slime:mine.f", reward_fn=lambda sample, prompt: 1.0
    )
    assert len(batches) == 2


async def test_a_rollout_function_that_asks_by_itself_asks_as_the_settings_say(
    write_plugins: WriteText, make_batches: Callable[..., Any]
) -> None:
    text = (
        "from slime.utils.http_utils import post\n"
        "async def f(args, rollout_id, data_source, evaluation=False):\n"
        "    groups = data_source(args.rollout_batch_size)\n"
        "    url = f'http://{args.sglang_router_ip}:{args.sglang_router_port}/generate'\n"
        "    for sample in (sample for group in groups for sample in group):\n"
        "        out = await post(url, {'text': sample.prompt, 'sampling_params': {'max_new_tokens': 4}})\n"
        "        sample.tokens = [ord(each) for each in sample.prompt] + out['output_ids']\n"
        "        sample.response, sample.response_length = out['text'], len(out['output_ids'])\n"
        "        sample.reward, sample.status = 1.0, type(sample).Status.COMPLETED\n"
        "    return groups\n"
    )
    engine = ScriptedEngine()
    sampling = {"min_new_tokens": 1, "repetition_penalty": 1.25, "rollout_top_k": 4, "rollout_stop": ("x",)}
    await make_batches(
        1,
        folder=write_plugins(text),
        engine=engine,
        rollout_fn="slime:mine.f",
        reward_fn=lambda sample, prompt: 1.0,
        sampling=sampling,
    )
    assert {
        (each.params.min_new_tokens, each.params.repetition_penalty, each.params.top_k, each.params.stop)
        for each in engine.requests
    } == {(1, 1.25, 4, ("x",))}


def test_a_sample_keeps_what_its_tokens_were_drawn_from() -> None:
    prompt = make_prompt()
    params = SamplingParams(max_new_tokens=4, top_k=2, return_sampling_mask=True)
    request = make_request(prompt, max_new_tokens=4, max_context_length=100, params=params)
    completion = Completion(
        token_ids=np.array([5, 6], np.int32),
        logprobs=np.array([-1.0, -0.5], np.float32),
        text="ab",
        finish_reason=FinishReason(FinishKind.STOP),
        version_spans=(VersionSpan(0, 2, 0),),
        precision="",
        prompt_tokens=len(prompt.token_ids),
        cached_tokens=0,
        timings=CompletionTimings(0.0, 0.0),
        sampling_mask=SamplingMask.of([[5, 9], [6]]),
    )
    made = Sample(
        label=prompt.label, tokens=[*prompt.token_ids.tolist(), 5, 6, 7], response_length=3, loss_mask=[1, 1, 0]
    )
    made.status = Sample.Status.COMPLETED
    sample = own_sample(made, request, [Sent(prompt.token_ids, completion)], policy_version=0)
    assert sample.sampling_mask is not None
    assert [ids.tolist() for ids in sample.sampling_mask.split()] == [[5, 9], [6], []]


@pytest.mark.parametrize(("tokens", "num_known"), [([5, 6, 7, 8, 9], 6), ([5, 6, 7, 8], 6), ([5, 2, 8], 3)])
def test_a_sample_keeps_the_experts_of_its_replies(tokens: list[int], num_known: int) -> None:
    """Two replies with a tool's token between them; as far as its tokens are those of the engine."""
    prompt = make_prompt("ab")
    request = make_request(prompt, max_new_tokens=9, max_context_length=100)

    def sent(before: list[int], new: list[int], number: int) -> Sent:
        num_tokens = len(before) + len(new) - 1
        experts_NC = np.repeat(np.arange(num_tokens)[:, None] + 10 * number, 2, axis=1)
        completion = Completion(
            token_ids=np.array(new, np.int32), logprobs=np.full(len(new), -1.0, np.float32), text="",
            finish_reason=FinishReason(FinishKind.LENGTH), version_spans=(VersionSpan(0, len(new), 0),), precision="",
            prompt_tokens=len(before), cached_tokens=0, timings=CompletionTimings(0.0, 0.0),
            routed_experts=RoutedExperts.of(experts_NC),
        )  # fmt: skip
        return Sent(np.array(before, np.int32), completion)

    start = prompt.token_ids.tolist()
    replies = [sent(start, [5, 6], 1), sent([*start, 5, 6, 7], [8, 9], 2)]
    made = Sample(label=prompt.label, tokens=[*start, *tokens], response_length=len(tokens))
    made.loss_mask = [0] * len(tokens)
    made.status = Sample.Status.COMPLETED
    sample = own_sample(made, request, replies, policy_version=0)
    assert sample.routed_experts is not None
    expected = [10, 11, 12, 23, 24, 25][: len(start) + len(tokens) - 1]
    known = sample.routed_experts.numbers[:, 0].tolist()
    assert known == expected[: len(known)]
    assert len(known) == min(num_known, len(start) + len(tokens) - 1)
    made.rollout_routed_experts = [[[1]]]
    with pytest.raises(ValueError, match="rollout_routed_experts, which no reply had"):
        own_sample(made, request, [], policy_version=0)

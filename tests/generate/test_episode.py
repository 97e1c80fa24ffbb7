"""What an episode has done is not done again: neither in the same process nor in a later one."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rollfeed.errors import RunFailedError
from rollfeed.generate import Episode, default_generate
from rollfeed.protocols import RolloutRequest, Services
from rollfeed.testing import CharTokenizer, ScriptedEngine, make_prompt
from rollfeed.types import Completion, FinishKind, FinishReason, Sample, SampleStatus, SamplingParams, VersionSpan

REQUEST = RolloutRequest(
    prompt=make_prompt("ab"),
    params=SamplingParams(max_new_tokens=40, seed=1, skip_special_tokens=True),
    group_index=0,
    index=0,
    rollout_id=0,
    step=0,
    max_context_length=100,
)


def services_of(engine: ScriptedEngine) -> Services:
    return Services(endpoint=engine, tokenizer=CharTokenizer(), default=default_generate)


class Tool:
    """Counts its calls, and raises in the first one if it is told to."""

    def __init__(self, *, fails: bool = False) -> None:
        self.num_calls = 0
        self._fails = fails

    async def __call__(self) -> tuple[int, int]:
        self.num_calls += 1
        if self._fails:
            raise ValueError("broken")
        return self.num_calls, 7


async def two_turns(services: Services, tool: Tool, *, arguments: object = (1, 2)) -> tuple[Sample, object]:
    episode = Episode(REQUEST, services)
    first = await episode.sample()
    answer = await episode.call("tool", arguments, tool, if_lost="lost")
    episode.tell(f" {answer} ")
    last = await episode.sample()
    assert first.finish_reason.kind is FinishKind.STOP
    return episode.end(last)[0], answer


async def test_what_was_done_is_given_again() -> None:
    async with ScriptedEngine() as engine:
        services, tool = services_of(engine), Tool()
        sample, answer = await two_turns(services, tool)
        again, answer_again = await two_turns(services, tool)
    assert len(engine.requests) == 2
    assert (tool.num_calls, answer, answer_again) == (1, [1, 7], [1, 7])
    assert sample.to_dict() == again.to_dict()
    mask = np.concatenate([np.ones(2), np.zeros(len(" [1, 7] ")), np.ones(2)])
    assert sample.loss_mask.tolist() == mask.tolist()


async def test_a_group_that_ended_begins_anew() -> None:
    async with ScriptedEngine() as engine:
        services, tool = services_of(engine), Tool()
        await two_turns(services, tool)
        services.journal.forget(0, step=0)
        await two_turns(services, tool)
    assert tool.num_calls == 2


async def test_a_tool_that_failed_is_not_called_again() -> None:
    async with ScriptedEngine() as engine:
        services, tool = services_of(engine), Tool(fails=True)
        with pytest.raises(ValueError, match="broken"):
            await two_turns(services, tool)
        for _ in range(2):
            assert (await two_turns(services, tool))[1] == "lost"
    assert tool.num_calls == 1


class Cut:
    """An endpoint that gives so many tokens of each further completion, and aborts the rest; None gives all."""

    policy_version = 0

    def __init__(self, engine: ScriptedEngine, *limits: int | None) -> None:
        self._engine = engine
        self._limits = list(limits)

    async def generate(self, token_ids, params, *, request_id, images=()) -> Completion:
        limit = self._limits.pop(0)
        whole = await self._engine.generate(token_ids, params, request_id=request_id)
        if limit is None:
            return whole
        return replace(
            whole,
            token_ids=whole.token_ids[:limit],
            logprobs=whole.logprobs[:limit],
            text=whole.text[:limit],
            version_spans=(VersionSpan(0, limit, 0),) if limit else (),
            finish_reason=FinishReason(FinishKind.ABORT),
        )


async def test_a_turn_that_was_aborted_is_resumed_where_it_was() -> None:
    texts = iter(["first", "second turn", "not looked at", "nd turn"])
    async with ScriptedEngine(answer=lambda request: next(texts)) as engine:
        services, tool = replace(services_of(engine), endpoint=Cut(engine, None, 4, 0, None)), Tool()
        for status in (SampleStatus.ABORTED, SampleStatus.ABORTED, SampleStatus.COMPLETED):
            sample, _ = await two_turns(services, tool)
            assert sample.status is status
    assert (sample.response, tool.num_calls) == ("second turn", 1)
    text = CharTokenizer().decode(sample.response_token_ids, skip_special_tokens=True)
    assert text == "first [1, 7] second turn"
    resumed = engine.requests[-1]
    assert resumed.params.max_new_tokens == 40 - len(resumed.token_ids) + 2


async def test_a_function_that_does_something_else_is_refused() -> None:
    async with ScriptedEngine() as engine:
        services = services_of(engine)
        await two_turns(services, Tool())
        with pytest.raises(RunFailedError, match=r"rollout 0, turn 1: in an earlier execution tool was called with"):
            await two_turns(services, Tool(), arguments="others")
        episode = Episode(REQUEST, services)
        with pytest.raises(RunFailedError, match="Sampled follows, not Called"):
            await episode.call("tool", None, Tool(), if_lost=None)
        episode = Episode(replace(REQUEST, prompt=make_prompt("abc")), services)
        with pytest.raises(RunFailedError, match="other tokens were sent"):
            await episode.sample()
    assert {task.get_name() for task in asyncio.all_tasks()} == {asyncio.current_task().get_name()}


async def test_compaction_makes_a_sample_of_what_was_and_one_from_the_summary() -> None:
    async def compacted(services: Services) -> list[Sample]:
        episode = Episode(REQUEST, services)
        await episode.sample()
        summary = services.tokenizer.encode("so far: ab", add_special_tokens=False)
        episode.fork(summary)
        return episode.end(await episode.sample())

    async with ScriptedEngine() as engine:
        services = services_of(engine)
        first, second = await compacted(services)
        again = await compacted(services)
    assert len(engine.requests) == 2
    assert first.token_ids[: first.prompt_length].tolist() == REQUEST.prompt.token_ids.tolist()
    assert (
        services.tokenizer.decode(second.token_ids[: second.prompt_length], skip_special_tokens=False) == "so far: ab"
    )
    assert all(each.loss_mask.all() and each.response_length == 2 for each in (first, second))
    assert engine.requests[1].params.max_new_tokens == engine.requests[0].params.max_new_tokens - 2
    assert engine.requests[1].params.seed != engine.requests[0].params.seed
    assert [each.to_dict() for each in again] == [first.to_dict(), second.to_dict()]


async def test_a_sub_agent_has_a_sample_of_its_own_and_its_answer_is_told() -> None:
    async def with_sub_agent(services: Services) -> list[Sample]:
        episode = Episode(REQUEST, services)
        await episode.sample()
        helper = episode.sub_agent(services.tokenizer.encode("look it up", add_special_tokens=False))
        found = await helper.sample()
        episode.tell(f" {found.text} ")
        return [*helper.end(found), *episode.end(await episode.sample())]

    async with ScriptedEngine() as engine:
        services = services_of(engine)
        helper, main = await with_sub_agent(services)
        again = await with_sub_agent(services)
    assert len(engine.requests) == 3
    assert services.tokenizer.decode(helper.token_ids, skip_special_tokens=False).startswith("look it up")
    assert main.token_ids[: main.prompt_length].tolist() == REQUEST.prompt.token_ids.tolist()
    assert main.loss_mask.tolist() == [1, 1, 0, *[0] * len(helper.response), 0, 1, 1]
    assert len({request.params.seed for request in engine.requests}) == 3
    assert [each.to_dict() for each in again] == [helper.to_dict(), main.to_dict()]

from dataclasses import replace

from rollfeed.generate import default_generate
from rollfeed.protocols import RolloutRequest, Services
from rollfeed.testing import CharTokenizer, ScriptedEngine, check_generate, make_prompt
from rollfeed.types import SampleStatus, SamplingParams


def request(**changes) -> RolloutRequest:
    made = RolloutRequest(
        prompt=make_prompt("ab"),
        params=SamplingParams(max_new_tokens=10, min_new_tokens=6, seed=1),
        group_index=0,
        index=0,
        rollout_id=0,
        step=0,
        max_context_length=100,
    )
    return replace(made, **changes)


async def answer(engine: ScriptedEngine, asked: RolloutRequest):
    services = Services(endpoint=engine, tokenizer=CharTokenizer(), default=default_generate)
    (sample,) = await default_generate(asked, services=services)
    return sample


async def test_it_keeps_the_contract_of_a_generate_function() -> None:
    await check_generate(default_generate)


async def test_finish_reasons_become_statuses() -> None:
    async with ScriptedEngine(answer=lambda r: "short") as engine:
        assert (await answer(engine, request())).status is SampleStatus.COMPLETED
    async with ScriptedEngine(answer=lambda r: "much too long to fit") as engine:
        sample = await answer(engine, request())
    assert sample.status is SampleStatus.TRUNCATED
    assert sample.response_length == 10
    assert sample.response == "much too l"


async def test_r13_a_resumed_sample_asks_for_the_rest_of_its_budget_only() -> None:
    async with ScriptedEngine(answer=lambda r: "x" * 50) as engine:
        partial = None
        for max_new_tokens, already in ((4, 0), (7, 4), (10, 7)):
            asked = request(params=SamplingParams(max_new_tokens=max_new_tokens), partial=partial)
            partial = replace(await answer(engine, asked), status=SampleStatus.ABORTED)
            assert engine.requests[-1].params.max_new_tokens == max_new_tokens - already
            assert len(engine.requests[-1].token_ids) == 2 + already
    assert partial is not None
    assert partial.response_length == 10
    assert partial.response == "x" * 10


async def test_the_parameters_of_the_request_are_not_changed() -> None:
    asked = request()
    async with ScriptedEngine() as engine:
        await answer(engine, asked)
    assert asked.params == SamplingParams(max_new_tokens=10, min_new_tokens=6, seed=1)


async def test_r14_a_sample_without_budget_is_truncated_without_a_request() -> None:
    async with ScriptedEngine(answer=lambda r: "x" * 50) as engine:
        full = await answer(engine, request())
        again = await answer(engine, request(partial=replace(full, status=SampleStatus.ABORTED)))
        assert len(engine.requests) == 1
    assert again.status is SampleStatus.TRUNCATED
    assert again.response == full.response


async def test_r15_the_context_bounds_the_budget() -> None:
    async with ScriptedEngine() as engine:
        await answer(engine, request(max_context_length=5))
        assert engine.requests[0].params.max_new_tokens == 3
        assert engine.requests[0].params.min_new_tokens == 3


async def test_a_resumed_sample_owes_only_the_rest_of_its_shortest_length() -> None:
    async with ScriptedEngine(answer=lambda r: "x" * 50) as engine:
        for already, owed in ((2, 4), (6, 0), (8, 0)):
            begun = await answer(engine, request(params=SamplingParams(max_new_tokens=already)))
            await answer(engine, request(partial=replace(begun, status=SampleStatus.ABORTED)))
            assert engine.requests[-1].params.min_new_tokens == owed
            assert engine.requests[-1].params.max_new_tokens == 10 - already

"""Each contract check passes what keeps the contract and refuses what breaks it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from rollfeed.errors import EngineUnavailableError
from rollfeed.testing import (
    CharTokenizer,
    ListSource,
    ScriptedEngine,
    check_advantage,
    check_batch_filter,
    check_batched_reward,
    check_engine,
    check_environment,
    check_generate,
    check_group_filter,
    check_group_reward,
    check_prompt_source,
    check_reward,
    check_rollout,
    check_sample_hook,
    check_tool,
    check_tracker,
)
from rollfeed.types import Correct, Ending, Keep, SamplingParams, TensorUpdate, Trained, Verdict


class Parrot:
    """An environment that is right in every way."""

    environment_id = "test/parrot"
    version = 1
    summary = "say the word"
    max_level = None

    def make(self, level: int, random: Random):
        word = "".join(random.choices("abc", k=level + 3))
        return f"Say: {word}", {"word": word}, word

    def verify(self, params, response: str) -> Verdict:
        right = response == params["word"]
        return Verdict(reward=float(right), correct=Correct.YES if right else Correct.NO)


async def test_what_keeps_its_contract_passes() -> None:
    await check_prompt_source(lambda: ListSource(["a", "b", "c"], repeat=True))
    await check_engine(ScriptedEngine(), token_ids=[65, 66])
    await check_reward(lambda sample, prompt: 1)
    await check_batched_reward(lambda samples, prompts: [0.5 for _ in samples])
    await check_group_reward(lambda samples, prompt: [{"a": 1.0} for _ in samples])
    check_group_filter(lambda samples: Keep())
    check_batch_filter(lambda groups: range(len(groups)))
    check_batch_filter(lambda groups: [5, 4, 3, 2, 1, 0][-len(groups) :][:3], rollout_batch_size=3)
    check_sample_hook(lambda sample, prompt: sample)
    check_advantage(lambda rewards_G, *, group: rewards_G - rewards_G.mean())
    check_environment(Parrot())


async def test_a_source_that_depends_on_the_size_of_draws_is_refused() -> None:
    class Skipping(ListSource):
        async def draw(self, count: int):
            prompts = await super().draw(count)
            await super().draw(1)
            return prompts

    with pytest.raises(AssertionError, match="depends on how many are drawn"):
        await check_prompt_source(lambda: Skipping(["a", "b", "c"], repeat=True))


async def test_a_source_that_forgets_its_position_is_refused() -> None:
    class Forgetful(ListSource):
        def load_state_dict(self, state) -> None:
            pass

    with pytest.raises(AssertionError, match="after restoring its state"):
        await check_prompt_source(lambda: Forgetful(["a", "b", "c"], repeat=True))


async def test_a_generate_function_that_makes_up_ids_is_refused() -> None:
    async def generate(request, *, services):
        samples = await services.default(request, services=services)
        return [replace(sample, rollout_id=99) for sample in samples]

    with pytest.raises(AssertionError, match="rollout_id is not the request's"):
        await check_generate(generate)


async def test_rewards_that_are_none_or_too_few_are_refused() -> None:
    with pytest.raises(AssertionError, match="'good' is not a number"):
        await check_reward(lambda sample, prompt: "good")
    with pytest.raises(AssertionError, match="not finite"):
        await check_reward(lambda sample, prompt: float("nan"))
    with pytest.raises(AssertionError, match="1 rewards for 3 samples"):
        await check_group_reward(lambda samples, prompt: [1.0])


async def test_a_rollout_function_that_returns_a_short_batch_is_refused() -> None:
    async def rollout(context) -> list[Ending]:
        (group,) = await context.draw(1)
        return [Trained(await context.submit(group))]

    with pytest.raises(AssertionError, match="1 groups were returned; the batch has 3"):
        await check_rollout(rollout)


async def test_a_rollout_function_that_always_makes_a_whole_batch_is_refused() -> None:
    async def rollout(context) -> list[Ending]:
        return [Trained(await context.submit(group)) for group in await context.draw(3)]

    with pytest.raises(AssertionError, match=r"3 groups were returned; the batch has 1: context\.rollout_batch_size"):
        await check_rollout(rollout)


async def test_a_rollout_function_that_leaves_groups_running_is_refused() -> None:
    async def rollout(context) -> list[Ending]:
        groups = [await context.submit(group) for group in await context.draw(3)]
        context.submit((await context.draw(1))[0])
        return list(map(Trained, groups))

    with pytest.raises(AssertionError, match="groups still run"):
        await check_rollout(rollout)


def test_filters_hooks_and_advantages_that_break_their_contract_are_refused() -> None:
    with pytest.raises(AssertionError, match="neither Keep nor Drop"):
        check_group_filter(lambda samples: True)
    for returned, said in (
        ([0, 1, 1, 2], "twice"),
        ([0, 1, 2, 8], r"indices \[8\]"),
        ([0, 1, 2], "3 indices make no batch of 4 groups"),
        (None, "not a sequence of indices"),
    ):
        with pytest.raises(AssertionError, match=said):
            check_batch_filter(lambda groups, returned=returned: returned)
    with pytest.raises(AssertionError, match="is not a Sample"):
        check_sample_hook(lambda sample, prompt: None)
    with pytest.raises(AssertionError, match="advantages for"):
        check_advantage(lambda rewards_G, *, group: rewards_G[:1])


def test_a_tracker_that_raises_is_found() -> None:
    class Tracker:
        def log(self, metrics, *, step: int) -> None:
            assert step == 0, "only one step"

        def close(self) -> None:
            pass

    with pytest.raises(AssertionError, match="only one step"):
        check_tracker(Tracker())


def test_a_tracker_that_does_not_say_how_it_calls_the_run_is_found(tmp_path: Path) -> None:
    class Tracker:
        def start(self, run):
            self.name = run.name

        def log(self, metrics, *, step: int) -> None: ...

        def log_samples(self, rows, *, step: int, name: str) -> None: ...

        def close(self) -> None: ...

    with pytest.raises(AssertionError, match="start returned None"):
        check_tracker(Tracker(), folder=tmp_path / "tracker")


class Shout:
    name = "shout"
    description = "shouts"
    parameters: Mapping[str, Any] = {"type": "object", "properties": {"text": {}}, "required": ["text"]}
    is_idempotent = True

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        return arguments["text"].upper()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"name": "a b"}, "is no name"),
        ({"description": ""}, "without a description"),
        ({"parameters": {"properties": {}}}, "JSON Schema of an object"),
        ({"parameters": {"type": "object", "required": ["x"]}}, "'x' is required and not described"),
        ({"is_idempotent": None}, "may be made again"),
    ],
)
async def test_tools_that_break_their_contract_are_refused(broken: dict[str, Any], message: str) -> None:
    await check_tool(Shout(), {"text": "a"})
    with pytest.raises(AssertionError, match=message):
        await check_tool(type("Broken", (Shout,), broken)(), {"text": "a"})


def test_environments_that_break_their_contract_are_refused() -> None:
    class Lenient(Parrot):
        def verify(self, params, response: str) -> Verdict:
            return Verdict(reward=1.0, correct=Correct.YES)

    class Moody(Parrot):
        calls = 0

        def make(self, level: int, random: Random):
            self.calls += 1
            return super().make(level + self.calls, random)

    with pytest.raises(AssertionError, match="'' is accepted"):
        check_environment(Lenient())
    with pytest.raises(AssertionError, match="made differently a second time"):
        check_environment(Moody())


async def test_a_scripted_engine_counts_versions_and_refuses_work_when_closed() -> None:
    engine, ids = ScriptedEngine(), CharTokenizer().encode("hi", add_special_tokens=False)
    async with engine:
        await engine.apply(TensorUpdate({}, policy_version=4))
        completion = await engine.generate(ids, SamplingParams(max_new_tokens=5, seed=1), request_id="a")
        assert completion.version_spans[0].policy_version == 4
        assert np.array_equal(completion.token_ids[-1:], [3])
    with pytest.raises(EngineUnavailableError):
        await engine.generate(ids, SamplingParams(max_new_tokens=5), request_id="b")

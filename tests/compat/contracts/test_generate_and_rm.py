"""Answering and scoring a sample, where a rollout function does it by itself: what comes before what.

Each plug-in asks with another temperature than the run's: what the run would do in the same way, it does.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollfeed.testing import ScriptedEngine

WriteText = Callable[[str], Path]
BEGIN = """
import copy
from slime.rollout.sglang_rollout import (
    GenerateState, abort, generate, generate_and_rm, generate_and_rm_group, generate_rollout_async
)
from slime.utils.types import Sample
calls = []
async def f(args, rollout_id, data_source, evaluation=False):
    args = copy.copy(args)
    params = {**GenerateState(args).sampling_params, "temperature": 0.5}
    group = data_source.get_samples(1)[0]
    sample = group[0]
    await check(args, group, sample, params)
    return (await generate_rollout_async(args, rollout_id, data_source))[0]
"""


@pytest.fixture
def play(write_plugins: WriteText, make_batches: Callable[..., Any]) -> Callable[..., Any]:
    """Return an async function that has a rollout function run ``check``, and gives the temperatures asked with."""

    async def run(check: str, **plugins: Any) -> list[float]:
        engine = ScriptedEngine()
        plugins = {"reward": {"rm_type": "random"}, **plugins}
        folder = write_plugins(f"{BEGIN}\n{check}")
        await make_batches(1, folder=folder, engine=engine, rollout_fn="slime:mine.f", **plugins)
        return [each.params.temperature for each in engine.requests if each.params.temperature != 1.0]

    return run


@pytest.mark.parametrize("status", ["COMPLETED", "TRUNCATED"])
async def test_a_finished_sample_is_returned_as_it_is(play: Any, status: str) -> None:
    asked = await play(
        "async def check(now, group, sample, params):\n"
        f"    sample.status, sample.reward, sample.response = Sample.Status.{status}, 0.5, 'a'\n"
        "    made = await generate_and_rm(now, sample, params)\n"
        "    assert made is sample and sample.reward == 0.5\n"
    )
    assert asked == []


async def test_old_tokens_are_masked_before_the_status_is_looked_at(play: Any) -> None:
    await play(
        "async def check(now, group, sample, params):\n"
        "    now.partial_rollout = now.mask_offpolicy_in_partial_rollout = True\n"
        "    sample.status, sample.reward = Sample.Status.COMPLETED, 0.5\n"
        "    sample.tokens, sample.response_length, sample.rollout_log_probs = [1, 2, 3], 2, [-1.0, -2.0]\n"
        "    made = await generate_and_rm(now, sample, params)\n"
        "    assert (made.loss_mask, made.rollout_log_probs) == ([0, 0], [-1.0, -2.0])\n"
    )


async def test_what_comes_after_an_abort_is_aborted_without_a_request(play: Any) -> None:
    asked = await play(
        "async def check(now, group, sample, params):\n"
        "    GenerateState(now).aborted = True\n"
        "    made = await generate_and_rm(now, sample, params)\n"
        "    assert made.status is Sample.Status.ABORTED and made.reward is None\n"
        "    assert await generate_and_rm_group(now, group, params) is group\n"
        "    GenerateState(now).aborted = False\n"
    )
    assert asked == []


async def test_a_samples_own_function_goes_before_the_runs_and_that_before_the_built_in_one(play: Any) -> None:
    functions = (
        "async def own(args, sample, sampling_params):\n"
        "    calls.append('own')\n    return await generate(args, sample, sampling_params)\n"
        "async def of_all(args, sample, sampling_params, evaluation):\n"
        "    calls.append(evaluation)\n    return await generate(args, sample, sampling_params)\n"
    )
    asked = await play(
        functions + "async def check(now, group, sample, params):\n"
        "    group[0].generate_function_path = 'mine.own'\n"
        "    await generate_and_rm(now, group[0], params)\n"
        "    await generate_and_rm(now, group[1], params)\n"
        "    now.custom_generate_function_path = 'mine.of_all'\n"
        "    await generate_and_rm(now, group[2], params)\n"
        "    await generate_and_rm(now, group[3], params, evaluation=True)\n"
        "    assert calls == ['own', False, True], calls\n"
    )
    assert asked == [0.5] * 4


async def test_a_samples_own_reward_goes_before_the_runs_and_that_before_the_grader(play: Any) -> None:
    functions = (
        "async def own(args, sample): return 7.0\n"
        "def of_all(args, sample): return 8.0\n"
        "async def ranks(args, samples): return [float(n) for n in range(len(samples))]\n"
    )
    await play(
        functions + "async def check(now, group, sample, params):\n"
        "    group[0].custom_rm_path = 'mine.own'\n"
        "    now.custom_rm_path = 'mine.of_all'\n"
        "    rewards = [(await generate_and_rm(now, each, params)).reward for each in group[:2]]\n"
        "    now.custom_rm_path = None\n"
        "    rewards.append((await generate_and_rm(now, group[2], params)).reward)\n"
        "    assert rewards[:2] == [7.0, 8.0] and rewards[2] in (0.0, 1.0), rewards\n"
        "    now.custom_rm_path, now.group_rm = 'mine.ranks', True\n"
        "    made = await generate_and_rm_group(now, group[:3], params)\n"
        "    assert [each.reward for each in made] == [0.0, 1.0, 2.0]\n"
    )


async def test_a_function_of_the_run_that_scores_lists_scores_one(play: Any) -> None:
    await play(
        "async def of_all(args, samples): return [9.0] * len(samples)\n"
        "async def check(now, group, sample, params):\n"
        "    assert (await generate_and_rm(now, sample, params)).reward == 9.0\n",
        reward=None,
        batched_reward="slime:mine.of_all",
    )


async def test_hooks_see_each_sample_of_a_list_before_it_is_scored(play: Any) -> None:
    await play(
        "def plain(args, sample, evaluation, rollout_id):\n"
        "    sample.metadata['seen'] = [evaluation, rollout_id]\n"
        "async def replacing(args, sample):\n"
        "    made = copy.copy(sample)\n"
        "    made.metadata = {**sample.metadata, 'also': sample.reward}\n    return made\n"
        "async def two(args, sample, sampling_params):\n"
        "    return [copy.deepcopy(await generate(args, sample, sampling_params)) for _ in range(1)] * 2\n"
        "async def check(now, group, sample, params):\n"
        "    now.rollout_sample_hook_path = ['mine.plain', 'mine.replacing']\n"
        "    now.custom_generate_function_path = 'mine.two'\n"
        "    made = await generate_and_rm(now, sample, params)\n"
        "    assert [each.metadata for each in made] == [{'seen': [False, 0], 'also': None}] * 2\n"
        "    assert all(each.reward is not None for each in made)\n"
    )


async def test_a_list_with_an_aborted_sample_is_not_scored_and_rewards_that_are_there_stay(play: Any) -> None:
    await play(
        "async def two(args, sample, sampling_params):\n"
        "    made = await generate(args, sample, sampling_params)\n"
        "    first, second = copy.deepcopy(made), copy.deepcopy(made)\n"
        "    first.reward = 0.25\n"
        "    if sample.index % 2:\n        second.status = Sample.Status.ABORTED\n"
        "    return [first, second]\n"
        "async def check(now, group, sample, params):\n"
        "    now.custom_generate_function_path = 'mine.two'\n"
        "    whole = await generate_and_rm(now, group[0], params)\n"
        "    assert whole[0].reward == 0.25 and whole[1].reward in (0.0, 1.0)\n"
        "    cut = await generate_and_rm(now, group[1], params)\n"
        "    assert [each.reward for each in cut] == [0.25, None]\n"
        "    now.group_rm = True\n"
        "    assert (await generate_and_rm(now, group[2], params))[1].reward is None\n"
    )


async def test_an_evaluation_is_refused_with_who_does_it(play: Any) -> None:
    await play(
        "from slime.rollout.sglang_rollout import eval_rollout, generate_rollout\n"
        "async def check(now, group, sample, params):\n"
        "    for ask in (lambda: eval_rollout(now, 0), lambda: generate_rollout(now, 0, None, evaluation=True)):\n"
        "        try:\n            ask()\n"
        "        except Exception as error:\n            assert 'evaluation is done by [eval]' in str(error)\n"
        "        else:\n            raise AssertionError\n"
    )

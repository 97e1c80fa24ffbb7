"""Answers of several turns across steps: what is resumed goes on where it was, what begins anew begins anew."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from rollfeed.generate import Episode
from rollfeed.store.codec import decode, encode
from rollfeed.testing import ListSource, ScriptedEngine
from rollfeed.types import RunState, SampleStatus, StepCommit


@pytest.mark.parametrize(("mode", "num_calls", "answer"), [("partial", 1, "lost"), ("sync", 2, "found")])
async def test_an_episode_that_the_end_of_a_step_cuts_in_its_tool(make_rollouts, mode, num_calls, answer) -> None:
    calls: Counter[int] = Counter()
    answers: dict[int, str] = {}

    async def generate(request, *, services):
        async def tool() -> str:
            calls[request.rollout_id] += 1
            if request.group_index == 0 and request.step == 0:
                await asyncio.Event().wait()
            return "found"

        episode = Episode(request, services)
        first = await episode.sample()
        if first.finish_reason.kind == "abort":
            return episode.end(first)
        answers[request.rollout_id] = await episode.call("tool", None, tool, if_lost="lost")
        episode.tell(answers[request.rollout_id])
        last = await episode.sample()
        return episode.end(last, response="1")

    source = ListSource([f"prompt {number}" for number in range(20)])
    async with make_rollouts(
        ScriptedEngine(),
        source=source,
        generate_fn=generate,
        mode=mode,
        over_sampling_batch_size=5,
        abort_grace_seconds=0.01,
        max_response_len=100,
    ) as rollouts:
        first = await rollouts.generate_batch()
        second = await rollouts.generate_batch()
    assert [group.group_index for group in first.groups] == [1, 2, 3, 4]
    assert 0 in [group.group_index for group in second.groups]
    assert {calls[0], calls[1]} == {num_calls}
    assert (answers[0], answers[2]) == (answer, "found")
    assert all(count == 1 for rollout_id, count in calls.items() if rollout_id > 1)


async def test_what_an_aborted_execution_wants_to_know_is_given_to_the_one_that_resumes(make_rollouts) -> None:
    """Also where it has no tokens, and after the state of a commit was stored and read."""
    told: list[object] = []

    async def generate(request, *, services):
        if request.group_index == 0:
            told.append(dict(request.state))
        (sample,) = await services.default(replace(request, partial=None), services=services)
        if request.group_index == 0 and request.step == 0:
            return [replace(sample, status=SampleStatus.ABORTED, state={"turn": request.rollout_id})]
        return [sample]

    commits: list[StepCommit] = []
    source = ListSource([f"prompt {number}" for number in range(20)])
    settings = {"generate_fn": generate, "mode": "partial", "over_sampling_batch_size": 5}
    async with make_rollouts(ScriptedEngine(), source=source, commit=commits.append, **settings) as rollouts:
        await rollouts.generate_batch()
    state = decode(RunState, encode(commits[0].state))
    async with make_rollouts(ScriptedEngine(), source=source, state=state, **settings) as rollouts:
        await rollouts.generate_batch()
    assert sorted(told, key=str) == [{"turn": 0}, {"turn": 1}, {}, {}]

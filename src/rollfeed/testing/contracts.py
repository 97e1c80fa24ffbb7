"""Contract checks for plug-in authors: call them from your own tests.

Each raises AssertionError with a sentence that says which promise of the protocol is broken.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random as global_random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from rollfeed.protocols import (
    AdvantageFn,
    BatchedRewardFn,
    Engine,
    Environment,
    GenerateFn,
    GroupFilter,
    GroupRewardFn,
    PromptSource,
    RewardFn,
    RolloutFn,
    RolloutRequest,
    RunningGroup,
    RunTracker,
    SampleHook,
    Services,
    Tool,
    TrackedRun,
    Tracker,
)
from rollfeed.testing.builders import make_group, make_prompt, make_request, make_sample
from rollfeed.testing.prompts import CharTokenizer
from rollfeed.testing.scripted import ScriptedEngine
from rollfeed.types import (
    Completion,
    Correct,
    Drop,
    Ending,
    FilterDecision,
    FinishKind,
    Group,
    Keep,
    Prompt,
    Sample,
    SampleStatus,
    SamplingParams,
    Trained,
    Verdict,
)


async def check_prompt_source(make: Callable[[], PromptSource], *, count: int = 6) -> None:
    """Check order, state and learning of a source; ``make`` returns a new one at its beginning."""
    whole = [prompt.prompt_id for prompt in await make().draw(count)]
    assert whole, "a new source has no prompt"
    source, pieces = make(), []
    for size in (1, 2, count - 3):
        pieces += [prompt.prompt_id for prompt in await source.draw(size)]
    assert pieces == whole, f"the order depends on how many are drawn at a time: {pieces} instead of {whole}"
    source = make()
    for number, prompt in enumerate(await source.draw(2)):
        source.learn(replace(make_group([0.0, 1.0], group_index=number), prompt=prompt))
    state = json.loads(json.dumps(source.state_dict()))
    rest = [prompt.prompt_id for prompt in await source.draw(count - 2)]
    restored = make()
    restored.load_state_dict(state)
    again = [prompt.prompt_id for prompt in await restored.draw(count - 2)]
    assert again == rest, f"after restoring its state the source hands out {again} instead of {rest}"


async def check_generate(generate: GenerateFn) -> None:
    """Check what a generate function returns for a plain prompt, and that it ends when a step is aborted."""
    prompt = make_prompt()
    place = {"group_index": 7, "index": 28, "rollout_id": 28}
    request = make_request(prompt, max_new_tokens=8, max_context_length=1000, **place)
    async with ScriptedEngine() as engine:
        services = Services(endpoint=engine, tokenizer=CharTokenizer(), default=_one_answer)
        for each in (request, replace(request, evaluation=True)):
            samples = await generate(each, services=services)
            assert samples, "no sample was returned"
            assert all(isinstance(sample, Sample) for sample in samples), "something else than samples was returned"
            assert {sample.group_index for sample in samples} == {7}, "group_index is not the request's"
            assert {sample.rollout_id for sample in samples} == {28}, "rollout_id is not the request's: forks share it"
            assert all(sample.status is not SampleStatus.PENDING for sample in samples), "a sample is still PENDING"
            for number in (sample.reward for sample in samples if sample.reward is not None):
                _check_reward_value(number)
        await generate(request, services=replace(services, endpoint=_ClosedEndpoint(engine)))


class _ClosedEndpoint:
    """Answers as an endpoint does after a step's abort."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self.policy_version = 0

    async def generate(self, *args: Any, **kwargs: Any) -> Completion:
        completion = await self._engine.generate(*args, **kwargs)
        empty = np.empty(0, np.float32)
        reason = completion.finish_reason._replace(kind=FinishKind.ABORT, matched=None)
        return replace(
            completion,
            token_ids=completion.token_ids[:0],
            logprobs=empty,
            text="",
            version_spans=(),
            finish_reason=reason,
        )


async def _one_answer(request: RolloutRequest, *, services: Services) -> Sequence[Sample]:
    completion = await services.endpoint.generate(request.prompt.token_ids, request.params, request_id="check")
    aborted = completion.finish_reason.kind is FinishKind.ABORT
    sample = make_sample(completion.text, reward=None, prompt=request.prompt)
    return [
        replace(
            sample,
            group_index=request.group_index,
            index=request.index,
            rollout_id=request.rollout_id,
            status=SampleStatus.ABORTED if aborted else SampleStatus.COMPLETED,
        )
    ]


async def check_reward(reward: RewardFn, *, sample: Sample | None = None, prompt: Prompt | None = None) -> None:
    """Check that a reward function returns a reward for a sample, also for one with an empty response."""
    prompt = prompt or make_prompt()
    for each in (sample or make_sample(reward=None, prompt=prompt), make_sample("", reward=None, prompt=prompt)):
        _check_reward_value(await _awaited(reward(each, prompt)))


async def check_batched_reward(reward: BatchedRewardFn, *, prompt: Prompt | None = None) -> None:
    """Check that a batched reward function returns one reward a sample."""
    prompt = prompt or make_prompt()
    samples = [make_sample(text, reward=None, member=i, prompt=prompt) for i, text in enumerate(["4", "5", ""])]
    _check_reward_list(await _awaited(reward(samples, [prompt] * len(samples))), len(samples))


async def check_group_reward(reward: GroupRewardFn, *, prompt: Prompt | None = None) -> None:
    """Check that a group reward function returns one reward a member."""
    prompt = prompt or make_prompt()
    samples = [make_sample(text, reward=None, member=i, prompt=prompt) for i, text in enumerate(["4", "5", ""])]
    _check_reward_list(await _awaited(reward(samples, prompt)), len(samples))


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _check_reward_list(rewards: Any, count: int) -> None:
    assert isinstance(rewards, Sequence), f"{rewards!r} is not a sequence of rewards"
    assert len(rewards) == count, f"{len(rewards)} rewards for {count} samples"
    for value in rewards:
        _check_reward_value(value)


def _check_reward_value(value: Any) -> None:
    if isinstance(value, Verdict):
        return
    values = list(value.values()) if isinstance(value, Mapping) else [value]
    assert values, "a reward dictionary is empty"
    for number in values:
        assert isinstance(number, int | float | np.number), f"{number!r} is not a number"
        assert np.isfinite(float(number)), f"reward {number!r} is not finite"


def check_group_filter(group_filter: GroupFilter) -> None:
    """Check that a filter decides on groups with and without spread, and does not depend on the members' order."""
    for rewards in ([0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]):
        samples = make_group(rewards).samples
        decisions = [group_filter(samples), group_filter(tuple(reversed(samples)))]
        assert all(isinstance(d, Keep | Drop) for d in decisions), f"{decisions[0]!r} is neither Keep nor Drop"
        kinds = {type(decision) for decision in decisions}
        assert len(kinds) == 1, f"the decision on {rewards} depends on the order of the samples"


def check_sample_hook(hook: SampleHook) -> None:
    """Check that a hook returns a sample of the same rollout."""
    sample, prompt = make_sample(reward=None), make_prompt()
    returned = hook(sample, prompt)
    assert isinstance(returned, Sample), f"{returned!r} is not a Sample; return the sample to use"
    assert returned.rollout_id == sample.rollout_id, "the hook changed rollout_id"


class _InstantContext:
    """Fits RolloutContext: groups finish at once, every third one fails the filter."""

    step = 0
    surplus: tuple[Group, ...] = ()
    policy_version = 0
    is_wanted = True

    def __init__(self, rollout_batch_size: int) -> None:
        self.rollout_batch_size = rollout_batch_size
        self.running: dict[int, RunningGroup] = {}
        self._num_drawn = 0

    async def changed(self) -> Collection[int]:
        await asyncio.sleep(0)
        return ()

    async def draw(self, count: int) -> list[Group]:
        numbers = range(self._num_drawn, self._num_drawn + count)
        self._num_drawn += count
        return [Group(number, make_prompt()) for number in numbers]

    def submit(self, group: Group) -> asyncio.Task[Group]:
        running = RunningGroup.of(group, n_samples_per_prompt=2, policy_version=0)
        running.task = asyncio.create_task(self._run(group))
        self.running[group.group_index] = running
        return running.task

    def decide(self, group: Group) -> FilterDecision:
        return Drop("third") if group.group_index % 3 == 2 else Keep()

    def requeue(self, group: Group) -> None:
        raise AssertionError(f"group {group.group_index} was requeued, and it is not too old")

    async def abort(self) -> None:
        await asyncio.gather(*(running.task for running in self.running.values()))

    async def _run(self, group: Group) -> Group:
        await asyncio.sleep(0)
        return make_group([0.0, 1.0], group_index=group.group_index)


async def check_rollout(rollout: RolloutFn) -> None:
    """Check that a rollout function returns one whole batch, names no group twice and leaves nothing running.

    It is called for other numbers of groups, too: what was too old is asked for again.
    """
    for rollout_batch_size in (3, 1):
        await _check_rollout(rollout, _InstantContext(rollout_batch_size))


async def _check_rollout(rollout: RolloutFn, context: _InstantContext) -> None:
    endings = await rollout(context)
    assert isinstance(endings, Sequence), f"{endings!r:.80} was returned; return a list of endings"
    others = [ending for ending in endings if not isinstance(ending, Ending)]
    assert not others, f"{others[0]!r:.80} is not an ending, such as Trained(group)"
    num_groups = sum(isinstance(ending, Trained) for ending in endings)
    assert num_groups == context.rollout_batch_size, (
        f"{num_groups} groups were returned; the batch has {context.rollout_batch_size}: context.rollout_batch_size"
    )
    named = [ending.group.group_index for ending in endings]
    twice = sorted({index for index in named if named.count(index) > 1})
    assert not twice, f"group {twice[0]} goes two ways"
    unknown = set(named) - context.running.keys()
    assert not unknown, f"groups {sorted(unknown)} were not submitted in this step"
    assert all(running.task.done() for running in context.running.values()), (
        "groups still run: await context.abort() at the end"
    )


def check_advantage(advantage: AdvantageFn) -> None:
    """Check that an advantage function returns one finite number a rollout, or for each sample one a response token.

    Also for equal rewards and one rollout.
    """
    for rewards in ([0.0, 1.0, 1.0, 0.0], [2.0, 2.0, 2.0], [1.0]):
        group = make_group(rewards)
        returned = list(advantage(np.array(rewards), group=group))
        assert len(returned) == len(rewards), f"{len(returned)} advantages for {len(rewards)} rewards"
        for value, sample in zip(returned, group.samples, strict=True):
            shape = np.shape(value)
            assert shape in ((), (sample.response_length,)), f"{shape} advantages for {sample.response_length} tokens"
            assert np.isfinite(value).all(), f"advantages of {rewards} are not finite: {returned}"


def check_tracker(tracker: Tracker, *, folder: Path = Path("trackers")) -> None:
    """Check that a tracker takes metrics of several steps, of an update and an evaluation, and can be closed.

    One that is told of the run may make ``folder`` and write to it.
    """
    if isinstance(tracker, RunTracker):
        run = TrackedRun(name="run", project="rollfeed", settings={"seed": 0}, folder=folder)
        run_id = tracker.start(run)
        assert isinstance(run_id, str), f"start returned {run_id!r}; it must return what the tracker calls the run"
    for step in range(2):
        tracker.log({"rollout/reward_mean": 0.5, "rollout/reward_std": float("nan")}, step=step)
        tracker.log({"train/loss": 0.5}, step=step)
        if isinstance(tracker, RunTracker):
            tracker.log_samples([{"prompt": "2 + 2", "response": "4", "reward": None}], step=step, name="samples")
    tracker.log({"eval/sums/accuracy": 0.5}, step=2)
    tracker.close()


async def check_tool(tool: Tool, arguments: Mapping[str, Any]) -> None:
    """Check what a tool says of itself, and what it answers to arguments that it takes."""
    assert re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", tool.name), f"{tool.name!r} is no name: letters, digits, _, . and -"
    assert tool.description, "without a description the policy does not know what it does"
    parameters = json.loads(json.dumps(tool.parameters))
    assert parameters.get("type") == "object", "parameters are the JSON Schema of an object"
    missing = [name for name in parameters.get("required", ()) if name not in parameters.get("properties", {})]
    assert not missing, f"parameters: {missing[0]!r} is required and not described"
    assert isinstance(tool.is_idempotent, bool), "is_idempotent says whether a call may be made again"
    answers = [await tool.call(arguments) for _ in range(1 + tool.is_idempotent)]
    for answer in answers:
        json.dumps(answer)


async def check_engine(engine: Engine, *, token_ids: Sequence[int], max_new_tokens: int = 4) -> None:
    """Check one completion, an abort of an unknown id, and the load of an engine that is not yet entered."""
    async with engine:
        await engine.health()
        params = SamplingParams(max_new_tokens=max_new_tokens, seed=1)
        completion = await engine.generate(np.array(token_ids, np.int32), params, request_id="check")
        assert len(completion.token_ids) <= max_new_tokens, "more tokens than max_new_tokens"
        assert (completion.logprobs <= 0).all(), "a logprob is above 0"
        assert completion.finish_reason.kind is not FinishKind.ABORT, "a request nobody aborted says ABORT"
        nothing = await engine.generate(
            np.array(token_ids, np.int32), SamplingParams(max_new_tokens=0), request_id="nothing"
        )
        assert nothing.finish_reason.kind is FinishKind.LENGTH, "max_new_tokens = 0 must give an empty LENGTH"
        await engine.abort("unknown")
        load = await engine.load()
        assert (load.running, load.waiting) == (0, 0), f"requests are left behind: {load}"


def check_environment(
    environment: Environment, *, levels: Sequence[int] = range(4), seeds: Sequence[int] = range(5)
) -> None:
    """Check that problems are reproducible, that right answers pass and that garbage does not."""
    before = _global_random_state()
    for level in levels:
        for seed in seeds:
            question, params, answer = environment.make(level, Random(seed))
            again = environment.make(level, Random(seed))
            assert (question, params, answer) == again, f"level {level}, seed {seed}: made differently a second time"
            lossless = json.loads(json.dumps(params))
            if answer is not None:
                verdict = environment.verify(lossless, answer)
                assert verdict.correct is Correct.YES, (
                    f"level {level}, seed {seed}: {answer!r} is not accepted: {verdict}"
                )
            for garbage in ("", " ", "?!", question):
                verdict = environment.verify(lossless, garbage)
                assert verdict.correct is not Correct.YES, f"level {level}, seed {seed}: {garbage!r} is accepted"
    assert before == _global_random_state(), "the global random state was touched; use the Random that make() is handed"


def _global_random_state() -> tuple[Any, ...]:
    numpy_state = np.random.get_state(legacy=False)
    return global_random.getstate(), numpy_state["state"]["key"].tolist(), numpy_state["state"]["pos"]

import asyncio
import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollfeed.errors import RunFailedError
from rollfeed.filters import AllWrong, compose
from rollfeed.protocols import Scorer
from rollfeed.routing import current_affinity
from rollfeed.store.codec import decode, encode
from rollfeed.testing import Fault, ListSource, ScriptedEngine
from rollfeed.types import (
    Correct,
    Outcome,
    Prompt,
    Rollout,
    RunState,
    Sample,
    SampleStatus,
    StepCommit,
    Verdict,
    VersionSpan,
)


def failing(*request_ids: str):
    return lambda request: Fault.RAISE if request.request_id in request_ids else None


async def test_one_failing_rollout_fails_its_group_only(make_rollouts) -> None:
    commits: list[StepCommit] = []
    engine = ScriptedEngine(fault_of=failing("step0-rollout3"))
    async with make_rollouts(engine, commit=commits.append) as rollouts:
        batch = await rollouts.generate_batch()
    (dropped,) = commits[0].dropped
    assert dropped.reason == "failed"
    assert dropped.group.group_index == 1
    assert [rollout.status for rollout in dropped.group.rollouts] == [SampleStatus.COMPLETED, SampleStatus.FAILED]
    assert "scripted fault for step0-rollout3" in str(dropped.group.rollouts[1].error)
    assert 1 not in [group.group_index for group in batch.groups]


async def test_requests_belong_to_their_group_and_rollout(make_rollouts) -> None:
    told = {}

    async def generate(request, *, services):
        told[request.group_index, request.rollout_id] = await asyncio.create_task(asyncio.to_thread(current_affinity))
        return await services.default(request, services=services)

    async with make_rollouts(ScriptedEngine(), generate_fn=generate) as rollouts:
        await rollouts.generate_batch()
    assert len({affinity.session for affinity in told.values()}) == len(told)
    assert len({affinity.group for affinity in told.values()}) == len({group for group, _ in told})
    assert current_affinity() == (None, None)


async def test_retrying_answers_a_failed_rollout_again(make_rollouts) -> None:
    failures = {"step0-rollout3": 1}

    async def generate(request, *, services):
        if failures.pop(f"step0-rollout{request.rollout_id}", 0):
            raise ValueError("once")
        return await services.default(request, services=services)

    async with make_rollouts(ScriptedEngine(), generate_fn=generate, group_failure="retry") as rollouts:
        batch = await rollouts.generate_batch()
    assert [group.group_index for group in batch.groups] == [0, 1, 2, 3]


async def test_refill_replaces_a_failed_group_at_once_and_alone(make_rollouts) -> None:
    engine = ScriptedEngine(fault_of=failing("step0-rollout3"))
    async with make_rollouts(engine, group_failure="refill", over_sampling_batch_size=6) as rollouts:
        await rollouts.generate_batch()
        assert rollouts.ledger.drawn == 7


async def test_the_failure_budget_stops_the_run_with_the_first_cause(make_rollouts) -> None:
    def raising(sample_index: int):
        raise ZeroDivisionError(f"rollout {sample_index}")

    async def generate(request, *, services):
        raising(request.rollout_id)

    async with make_rollouts(ScriptedEngine(), generate_fn=generate, failure_minimum=6) as rollouts:
        with pytest.raises(
            RunFailedError,
            match=r"6 of the last 6 rollouts failed, .*failure_budget = 0.1 .*ZeroDivisionError: rollout 0",
        ):
            await rollouts.generate_batch()
    assert {task.get_name() for task in asyncio.all_tasks()} <= {asyncio.current_task().get_name()}


async def test_groups_that_end_the_run_at_once_leave_no_error_that_nobody_has_read(make_rollouts) -> None:
    unread: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))

    async def generate(request, *, services):
        raise ValueError("broken")

    async with make_rollouts(ScriptedEngine(), generate_fn=generate, rollout_batch_size=8, failure_minimum=1) as made:
        with pytest.raises(RunFailedError, match="broken"):
            await made.generate_batch()
    del made
    gc.collect()
    assert unread == []


async def test_a_rollout_that_takes_too_long_fails(make_rollouts) -> None:
    engine = ScriptedEngine(fault_of=lambda r: Fault.DEAF if r.request_id == "step0-rollout0" else None)
    commits: list[StepCommit] = []
    loop = asyncio.get_running_loop()
    now = loop.time()
    loop.time = lambda: now  # it passes for the one that does not answer, and for no other
    async with make_rollouts(engine, rollout_timeout_seconds=0.05, commit=commits.append) as rollouts:
        making = asyncio.create_task(rollouts.generate_batch())
        while len(engine.requests) < 8 or (await engine.load()).running > 1:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        now += 0.05
        await making
    del loop.time
    (dropped,) = commits[0].dropped
    assert "not answered within rollout_timeout_seconds = 0.05" in str(dropped.group.rollouts[0].error)


async def test_a_generate_function_that_returns_no_sample_fails_its_rollout(make_rollouts) -> None:
    async def generate(request, *, services):
        return []

    async with make_rollouts(ScriptedEngine(), generate_fn=generate, failure_minimum=1) as rollouts:
        with pytest.raises(RunFailedError, match="must return a list of at least one Sample"):
            await rollouts.generate_batch()


@pytest.mark.parametrize("status", [SampleStatus.FAILED, SampleStatus.PENDING])
async def test_a_sample_that_has_not_ended_is_a_failed_rollout_and_not_an_aborted_one(make_rollouts, status) -> None:
    async def generate(request, *, services):
        samples = await services.default(request, services=services)
        return [replace(sample, status=status) for sample in samples] if request.group_index == 1 else samples

    commits: list[StepCommit] = []
    async with make_rollouts(ScriptedEngine(), generate_fn=generate, commit=commits.append) as rollouts:
        await rollouts.generate_batch()
    (dropped,) = commits[0].dropped
    assert dropped.group.group_index == 1
    assert f"returned a sample whose status is {status.value}" in str(dropped.group.rollouts[0].error)


async def test_a_failed_reward_is_a_failed_rollout_and_never_a_zero(make_rollouts) -> None:
    class SlowOnce(Scorer):
        async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
            bad = prompt.prompt_id == "list/2@e0"
            return [
                Verdict(reward=None, outcome=Outcome.TIMEOUT, detail="slow")
                if bad and rollout.rollout_id % 2 == 1
                else Verdict(reward=1.0)
                for rollout in rollouts
            ]

    commits: list[StepCommit] = []
    async with make_rollouts(ScriptedEngine(), scorer=SlowOnce(), commit=commits.append) as rollouts:
        await rollouts.generate_batch()
    (dropped,) = commits[0].dropped
    failed = dropped.group.rollouts[1]
    assert failed.status is SampleStatus.FAILED
    assert failed.samples[0].reward is None
    assert "reward timeout: slow" in str(failed.error)


async def test_retrying_scores_only_what_failed_to_be_scored(make_rollouts) -> None:
    seen: list[int] = []

    class Flaky(Scorer):
        async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
            (rollout,) = rollouts
            seen.append(rollout.rollout_id)
            if seen.count(1) == 1 and rollout.rollout_id == 1:
                return [Verdict(reward=None, outcome=Outcome.ERROR, detail="flaky")]
            return [Verdict(reward=float(rollout.rollout_id))]

    async with make_rollouts(ScriptedEngine(), scorer=Flaky(), group_failure="retry", rollout_batch_size=1) as rollouts:
        batch = await rollouts.generate_batch()
    assert sorted(seen) == [0, 1, 1]
    assert batch.groups[0].reward_values().tolist() == [0.0, 1.0]


async def test_retrying_a_group_reward_hands_over_what_is_scored_already(make_rollouts) -> None:
    seen: list[list[float | None]] = []

    class Flaky(Scorer):
        def scores_alone(self, rollout: Rollout, prompt: Prompt) -> bool:
            return False

        async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
            seen.append([rollout.samples[0].reward for rollout in rollouts])
            first = len(seen) == 1
            return [
                Verdict(reward=None, outcome=Outcome.ERROR, detail="flaky")
                if first and i == 1
                else Verdict(reward=float(i))
                for i, _ in enumerate(rollouts)
            ]

    async with make_rollouts(ScriptedEngine(), scorer=Flaky(), group_failure="retry", rollout_batch_size=1) as rollouts:
        batch = await rollouts.generate_batch()
    assert seen == [[None, None], [0.0, None]]
    assert batch.groups[0].reward_values().tolist() == [0.0, 1.0]


class Recording(Scorer):
    """Notes whom it scores; ``alone`` or, like a group reward, together."""

    def __init__(self, *, alone: bool = True) -> None:
        self.alone = alone
        self.scored: list[int] = []

    def scores_alone(self, rollout: Rollout, prompt: Prompt) -> bool:
        return self.alone

    async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
        assert all(rollout.has_finished for rollout in rollouts)
        self.scored += [rollout.rollout_id for rollout in rollouts]
        return [Verdict(reward=float(rollout.rollout_id)) for rollout in rollouts]


def hanging(*request_ids: str):
    return lambda request: Fault.HANG if request.request_id in request_ids else None


async def test_a_member_is_scored_while_others_of_its_group_are_generated(make_rollouts) -> None:
    scored = asyncio.Event()

    class Telling(Recording):
        async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
            scored.set()
            return await super().score(rollouts, prompt)

    async def generate(request, *, services):
        if request.rollout_id == 1:
            await scored.wait()
        return await services.default(request, services=services)

    scorer = Telling()
    async with make_rollouts(
        ScriptedEngine(), generate_fn=generate, scorer=scorer, rollout_batch_size=1, rollout_timeout_seconds=60.0
    ) as rollouts:
        batch = await rollouts.generate_batch()
    assert scorer.scored == [0, 1]
    assert batch.groups[0].reward_values().tolist() == [0.0, 1.0]


async def test_group_rewards_wait_for_the_whole_group(make_rollouts) -> None:
    scorer = Recording(alone=False)
    engine = ScriptedEngine(fault_of=hanging("step0-rollout0"))
    async with make_rollouts(engine, over_sampling_batch_size=5, scorer=scorer) as rollouts:
        await rollouts.generate_batch()
    assert sorted(scorer.scored) == [2, 3, 4, 5, 6, 7, 8, 9]


async def test_members_scored_before_an_abort_keep_their_verdicts_and_are_not_scored_again(make_rollouts) -> None:
    commits: list[StepCommit] = []
    engine = ScriptedEngine(fault_of=hanging("step0-rollout0"))
    scorer = Recording()
    partial = {"mode": "partial", "over_sampling_batch_size": 5}
    async with make_rollouts(engine, scorer=scorer, commit=commits.append, **partial) as rollouts:
        await rollouts.generate_batch()
        (kept,) = [draw for draw in commits[0].state.requeued if draw.group_index == 0]
        assert kept.rollouts[1].verdict == Verdict(reward=1.0)
        batch = await rollouts.generate_batch()
    assert batch.groups[0].group_index == 0
    assert batch.groups[0].reward_values().tolist() == [0.0, 1.0]
    assert scorer.scored.count(1) == scorer.scored.count(0) == 1
    assert [request.request_id for request in engine.requests].count("step1-rollout1") == 0


async def test_a_verdict_from_before_an_abort_comes_back_from_the_store(make_rollouts) -> None:
    commits: list[StepCommit] = []
    partial = {"mode": "partial", "over_sampling_batch_size": 5}
    engine = ScriptedEngine(fault_of=hanging("step0-rollout0"))
    async with make_rollouts(engine, scorer=Recording(), commit=commits.append, **partial) as rollouts:
        await rollouts.generate_batch()
    scorer = Recording()
    state = decode(RunState, encode(commits[0].state))
    async with make_rollouts(ScriptedEngine(), scorer=scorer, state=state, **partial) as rollouts:
        batch = await rollouts.generate_batch()
    assert batch.groups[0].reward_values().tolist() == [0.0, 1.0]
    assert 0 in scorer.scored
    assert 1 not in scorer.scored


async def test_members_that_were_not_scored_when_their_group_was_stopped_are_scored_when_it_goes_on(
    make_rollouts,
) -> None:
    class Stuck(Recording):
        async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
            if rollouts[0].rollout_id == 1 and 1 not in self.scored:
                self.scored.append(1)
                await asyncio.Event().wait()
            return await super().score(rollouts, prompt)

    engine = ScriptedEngine(fault_of=hanging("step0-rollout0"))
    scorer = Stuck()
    partial = {"mode": "partial", "over_sampling_batch_size": 5, "abort_grace_seconds": 0.3}
    async with make_rollouts(engine, scorer=scorer, **partial) as rollouts:
        await rollouts.generate_batch()
        batch = await rollouts.generate_batch()
    assert batch.groups[0].reward_values().tolist() == [0.0, 1.0]
    assert scorer.scored.count(1) == 2
    assert [request.request_id for request in engine.requests].count("step1-rollout1") == 0


async def test_rewards_of_a_group_that_is_answered_anew_are_not_waited_for(make_rollouts) -> None:
    class Stuck(Recording):
        async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
            if rollouts[0].rollout_id == 1 and 1 not in self.scored:
                self.scored.append(1)
                await asyncio.Event().wait()
            return await super().score(rollouts, prompt)

    engine = ScriptedEngine(fault_of=hanging("step0-rollout0"))
    async with make_rollouts(engine, scorer=Stuck(), over_sampling_batch_size=5, abort_grace_seconds=600.0) as rollouts:
        await asyncio.wait_for(rollouts.generate_batch(), 60.0)


async def test_no_place_at_the_engine_is_held_while_rewards_are_computed(make_rollouts) -> None:
    everybody = asyncio.Barrier(8)

    class Together(Recording):
        async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
            await everybody.wait()
            return await super().score(rollouts, prompt)

    async with make_rollouts(ScriptedEngine(), scorer=Together(), max_requests_in_flight=1) as rollouts:
        batch = await asyncio.wait_for(rollouts.generate_batch(), 60.0)
    assert len(batch.groups) == 4


async def test_the_watchdog_tells_groups_that_wait_for_rewards_from_those_that_are_generated(make_rollouts) -> None:
    told: list[str] = []
    ended = asyncio.Event()

    class Stuck(Recording):
        async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
            if prompt.prompt_id == "list/2@e0":
                await ended.wait()
            return await super().score(rollouts, prompt)

    class Watch:
        def waiting(self, message: str) -> None:
            told.append(message)
            if "(1 scoring)" in message:  # a pause before has a message of its own
                ended.set()

        def __getattr__(self, name: str):
            return lambda *_args, **_kwargs: None

    async with make_rollouts(ScriptedEngine(), scorer=Stuck(), watchdog_seconds=0.05, observers=[Watch()]) as rollouts:
        await asyncio.wait_for(rollouts.generate_batch(), 60.0)
    assert any("1 groups (1 scoring), the oldest is group 2 (scoring)" in message for message in told)


async def test_the_sample_hook_sees_every_finished_sample_before_it_is_scored(make_rollouts) -> None:
    def hook(sample: Sample, prompt: Prompt) -> Sample:
        return replace(sample, response="7")

    async with make_rollouts(ScriptedEngine(), sample_hook=hook) as rollouts:
        batch = await rollouts.generate_batch()
    assert all(sample.reward == 7.0 for sample in batch.samples)


async def test_filters_ask_the_verdict_whether_a_rollout_is_correct(make_rollouts) -> None:
    class Grading(Scorer):
        async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
            # Group 1 has wrong answers with shaped rewards, the others right ones.
            correct = Correct.NO if prompt.prompt_id == "list/1@e0" else Correct.YES
            return [Verdict(reward=0.18, correct=correct) for _ in rollouts]

    commits: list[StepCommit] = []
    group_filter = compose([AllWrong(n_samples_per_prompt=2)])
    async with make_rollouts(
        ScriptedEngine(), scorer=Grading(), group_filter=group_filter, commit=commits.append
    ) as rollouts:
        batch = await rollouts.generate_batch()
    assert [dropped.group.group_index for dropped in commits[0].dropped] == [1]
    assert {sample.correct for sample in batch.samples} == {Correct.YES}


async def test_r26_indices_are_unique_over_epochs(make_rollouts) -> None:
    source = ListSource([f"prompt {n}" for n in range(5)], repeat=True)
    async with make_rollouts(ScriptedEngine(), source=source, rollout_batch_size=5) as rollouts:
        batches = [await rollouts.generate_batch() for _ in range(3)]
    groups = [group for batch in batches for group in batch.groups]
    samples = [sample for group in groups for sample in group.samples]
    assert len({group.group_index for group in groups}) == 15
    assert len({sample.index for sample in samples}) == 30
    assert all(len(group.samples) == 2 for group in groups)


async def test_seeds_depend_on_step_group_and_member_only(make_rollouts) -> None:
    def seeds_of(engine: ScriptedEngine) -> dict[str, int | None]:
        return {request.request_id: request.params.seed for request in engine.requests}

    engines = [ScriptedEngine(random_order=order) for order in range(2)]
    for engine in engines:
        async with make_rollouts(engine) as rollouts:
            await rollouts.generate_batch()
    assert seeds_of(engines[0]) == seeds_of(engines[1])
    assert len(set(seeds_of(engines[0]).values())) == 8
    other = ScriptedEngine()
    async with make_rollouts(other, seed=1) as rollouts:
        await rollouts.generate_batch()
    assert set(seeds_of(other).values()).isdisjoint(seeds_of(engines[0]).values())


@pytest.mark.parametrize("failure_retries", [1, 3])
async def test_a_rollout_is_tried_once_and_then_as_often_as_failure_retries_says(
    make_rollouts, failure_retries
) -> None:
    tries = 0

    async def generate(request, *, services):
        nonlocal tries
        if request.rollout_id == 3:
            tries += 1
            raise ValueError("always")
        return await services.default(request, services=services)

    commits: list[StepCommit] = []
    settings = {"group_failure": "retry", "failure_retries": failure_retries, "commit": commits.append}
    async with make_rollouts(ScriptedEngine(), generate_fn=generate, **settings) as rollouts:
        await rollouts.generate_batch()
    assert tries == 1 + failure_retries
    assert [dropped.reason for dropped in commits[0].dropped] == ["failed"]


@pytest.mark.parametrize("failure_retries", [1, 3])
async def test_a_response_is_graded_once_and_then_as_often_as_failure_retries_says(
    make_rollouts, failure_retries
) -> None:
    gradings: Counter[int] = Counter()

    class Failing(Scorer):
        async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
            gradings.update(rollout.rollout_id for rollout in rollouts if rollout.samples[0].reward is None)
            bad = Verdict(reward=None, outcome=Outcome.ERROR, detail="always")
            return [bad if rollout.rollout_id == 3 else Verdict(reward=1.0) for rollout in rollouts]

    settings = {"group_failure": "retry", "failure_retries": failure_retries}
    async with make_rollouts(ScriptedEngine(), scorer=Failing(), **settings) as rollouts:
        batch = await rollouts.generate_batch()
    assert gradings[3] == 1 + failure_retries
    assert gradings[2] == 1
    assert batch.metrics["rollout/reward_error"] == 1 + failure_retries
    assert batch.metrics["rollout/reward_timeout"] == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: {"token_ids": np.concatenate([s.token_ids[1:], s.token_ids[:1]])}, "do not begin with the prompt's"),
        (lambda s: {"token_ids": np.where(s.token_ids == 3, 2**30, s.token_ids)}, "out of a vocabulary of 1114112"),
        (lambda s: {"logprobs": s.logprobs + 2.0}, "its logprobs go from 1 to 1"),
        (lambda s: {"logprobs": s.logprobs * np.nan}, "its logprobs go from nan"),
        (lambda s: {"loss_mask": s.loss_mask * 3.0}, "its loss mask goes from 3 to 3"),
        (lambda s: {"rollout_id": s.index + 1}, "it is of rollout 1 in group 0, its request of 0 in 0"),
        (lambda s: {"version_spans": (VersionSpan(0, s.response_length, 999),)}, "of version 999, 0 is the newest"),
    ],
)
@pytest.mark.parametrize("is_hook", [False, True])
async def test_a_sample_of_a_plug_in_that_cannot_be_its_rollouts_fails_it(make_rollouts, change, said, is_hook) -> None:
    commits: list[StepCommit] = []

    def lie(sample: Sample, prompt: Prompt) -> Sample:
        del prompt
        return replace(sample, **change(sample)) if sample.index == 0 else sample

    async def generate(request, *, services):
        samples = await services.default(request, services=services)
        return [lie(sample, request.prompt) for sample in samples]

    plug_in = {"sample_hook": lie} if is_hook else {"generate_fn": generate}
    async with make_rollouts(ScriptedEngine(), commit=commits.append, **plug_in) as rollouts:
        await rollouts.generate_batch()
    (dropped,) = commits[0].dropped
    message = str(dropped.group.rollouts[0].error)
    assert said in message
    assert ("plugins.sample_hook" if is_hook else "plugins.generate") in message


async def test_arrays_that_plug_ins_are_handed_cannot_be_written_to(make_rollouts) -> None:
    refused: Counter[str] = Counter()

    def write(where: str, array: Any) -> None:
        try:
            array[:1] = 0
        except ValueError:
            refused[where] += 1

    async def generate(request, *, services):
        write("prompt", request.prompt.token_ids)
        return await services.default(request, services=services)

    def hook(sample: Sample, prompt: Prompt) -> Sample:
        for name in ("token_ids", "loss_mask", "logprobs"):
            write(name, getattr(sample, name))
        return sample

    async with make_rollouts(ScriptedEngine(), generate_fn=generate, sample_hook=hook) as rollouts:
        await rollouts.generate_batch()
    assert set(refused) == {"prompt", "token_ids", "loss_mask", "logprobs"}
    assert len(set(refused.values())) == 1

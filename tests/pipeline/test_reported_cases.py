"""Bugs that were reported elsewhere, as they would look here."""

import asyncio
import os
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollfeed.buffer import Buffer, fifo
from rollfeed.errors import RunFailedError
from rollfeed.filters import build_filter
from rollfeed.protocols import Scorer
from rollfeed.sample_builder import SampleBuilder
from rollfeed.testing import CharTokenizer, Fault, ListSource, ScriptedEngine, make_group, make_prompt, make_sample
from rollfeed.types import Drop, Group, Keep, LedgerCounts, Outcome, Rollout, RunState, SampleStatus, Verdict


def prompts(count: int = 10_000) -> ListSource:
    return ListSource([f"prompt {number}" for number in range(count)])


OVER_SAMPLED = {"over_sampling_batch_size": 6, "refill_granularity": 1, "max_response_len": 1000}


async def two_turns(request, *, services):
    """Ask twice; begins from the prompt each time, whatever there was."""
    builder = SampleBuilder(replace(request, partial=None))
    for turn in range(2):
        completion = await services.endpoint.generate(
            builder.token_ids, request.params, request_id=f"turn{turn}-rollout{request.rollout_id}"
        )
        builder.append_completion(completion)
        if completion.finish_reason.kind == "abort":
            return [builder.build(SampleStatus.ABORTED, response=completion.text)]
        builder.append_inserted(np.array([ord("0")], np.int32), policy_version=services.endpoint.policy_version)
    return [builder.build(SampleStatus.COMPLETED, response=completion.text)]


async def test_r07_a_sample_that_begins_again_has_nothing_of_what_it_had(make_rollouts, tick_engine) -> None:
    tries: Counter[int] = Counter()

    def length_of(rollout_id: int) -> int:
        tries[rollout_id] += 1
        return 100 if rollout_id < 2 and tries[rollout_id] == 1 else 3  # the first try of group 0 is cut short

    engine = tick_engine(length_of)
    seen = None
    async with make_rollouts(
        engine, source=prompts(), mode="partial", refill_counts="in_flight", generate_fn=begin_anew, **OVER_SAMPLED
    ) as rollouts:
        while seen is None:
            samples = (await rollouts.generate_batch()).samples
            assert all(
                len(each.loss_mask) == len(each.logprobs) == each.response_length == each.version_spans[-1].end
                for each in samples
            )
            seen = next((each for each in samples if each.group_index == 0), None)
    assert seen.response_length == 3
    assert tries[0] == 2


async def begin_anew(request, *, services):
    """Forget what an aborted execution left."""
    return await services.default(replace(request, partial=None), services=services)


async def test_r19_a_rollout_aborted_in_its_second_turn_is_in_the_buffer_once_and_not_in_the_batch(
    make_rollouts,
) -> None:
    engine = ScriptedEngine(
        fault_of=lambda request: (
            Fault.HANG if request.request_id.startswith("turn1") and _text(request).startswith("prompt 0") else None
        )
    )
    commits = []
    async with make_rollouts(
        engine, source=prompts(), mode="partial", generate_fn=two_turns, commit=commits.append, **OVER_SAMPLED
    ) as rollouts:
        batch = await rollouts.generate_batch()
    assert 0 not in [group.group_index for group in batch.groups]
    waiting = [draw.group_index for draw in commits[0].state.requeued]
    assert waiting.count(0) == 1
    assert 0 not in [group.group_index for group in commits[0].state.surplus]
    assert all(sample.status is SampleStatus.COMPLETED for sample in batch.samples)


def _text(request) -> str:
    return "".join(map(chr, request.token_ids))


@pytest.mark.parametrize("only_empty", [False, True])
async def test_r20_empty_responses_are_legal_and_leave_all_metrics_finite(make_rollouts, only_empty) -> None:
    async def answer(request, *, services):
        builder = SampleBuilder(request)
        if only_empty or request.index % 2:
            return [builder.build(SampleStatus.TRUNCATED, response="")]
        return await services.default(request, services=services)

    async with make_rollouts(ScriptedEngine(), source=prompts(), generate_fn=answer) as rollouts:
        batch = await rollouts.generate_batch()
    assert all(np.isfinite(value) for value in batch.metrics.values())
    assert batch.metrics["rollout/empty_ratio"] == (1.0 if only_empty else 0.5)
    assert np.isfinite(batch.advantages_S).all()


async def test_r23_an_overlong_sample_stays_in_its_group(make_rollouts) -> None:
    async def answer(request, *, services):
        short = (
            replace(request, max_context_length=len(request.prompt.token_ids)) if request.index % 4 == 1 else request
        )
        return await services.default(short, services=services)

    async with make_rollouts(
        ScriptedEngine(), source=prompts(), generate_fn=answer, n_samples_per_prompt=4
    ) as rollouts:
        batch = await rollouts.generate_batch()
    for group in batch.groups:
        assert [rollout.status for rollout in group.rollouts].count(SampleStatus.TRUNCATED) == 1
        assert len(group.samples) == 4


async def test_r24_finished_groups_that_a_batch_does_not_need_are_each_trained_once(make_rollouts) -> None:
    settings = {"rollout_batch_size": 8, "over_sampling_batch_size": 20, "n_samples_per_prompt": 1}
    async with make_rollouts(ScriptedEngine(), source=prompts(), mode="async", max_staleness=8, **settings) as rollouts:
        trained: Counter[int] = Counter()
        for _ in range(3):
            trained.update(group.group_index for group in (await rollouts.generate_batch()).groups)
            for _ in range(200):  # all that may run has finished before the next batch is asked for
                await asyncio.sleep(0)
            counts = rollouts.ledger
            assert counts.balanced
    assert set(trained.values()) == {1}
    assert sum(trained.values()) == 24


async def test_r25_over_sampled_prompts_are_trained_equally_often_whatever_their_length(
    make_rollouts, tick_engine
) -> None:
    lengths = {number: 2 + 3 * number for number in range(64)}
    engine = tick_engine(lambda rollout_id: lengths[rollout_id // 2 % 64], slots=64)
    times, used = Counter(), []
    async with make_rollouts(
        engine,
        source=ListSource([f"prompt {number}" for number in range(64)], repeat=True),
        mode="partial",
        rollout_batch_size=32,
        over_sampling_factor=1.5,
        refill_granularity=1,
        max_response_len=1000,
    ) as rollouts:
        for _ in range(20):
            for sample in (await rollouts.generate_batch()).samples:
                times[sample.group_index % 64] += 1
                used.append(sample.response_length)
        rest = rollouts.ledger.drawn - 640
    assert max(times.values()) - min(times[number] for number in range(64)) <= 2 * 2
    assert rest == 16
    drawn = [lengths[number % 64] for number in range(640 + rest)]
    assert abs(np.mean(used) / np.mean(drawn) - 1.0) < 0.02


async def test_r26_forked_samples_share_their_group_and_have_rollouts_of_exact_size(make_rollouts) -> None:
    async def fork(request, *, services):
        (sample,) = await services.default(request, services=services)
        return [sample, replace(sample, index=sample.index)]

    source = ListSource([f"prompt {number}" for number in range(5)], repeat=True)
    async with make_rollouts(
        ScriptedEngine(), source=source, generate_fn=fork, rollout_batch_size=5, n_samples_per_prompt=2
    ) as rollouts:
        batches = [await rollouts.generate_batch() for _ in range(3)]
    groups = [group for batch in batches for group in batch.groups]
    assert len({group.group_index for group in groups}) == 15
    assert len({group.prompt.prompt_id for group in groups}) == 15
    assert len({rollout.rollout_id for group in groups for rollout in group.rollouts}) == 30
    for group in groups:
        assert [len(rollout.samples) for rollout in group.rollouts] == [2, 2]
        assert {sample.group_index for sample in group.samples} == {group.group_index}


class RaisesForThird(Scorer):
    """One verdict a rollout, joined by position; the third grading fails."""

    async def score(self, rollouts, prompt):
        del prompt
        return [
            Verdict(reward=None, outcome=Outcome.ERROR, detail="raised")
            if rollout.rollout_id % 4 == 3
            else Verdict(reward=float(rollout.rollout_id))
            for rollout in rollouts
        ]


async def test_r27_a_grading_that_raises_moves_no_other_reward(make_rollouts) -> None:
    seen = {}

    class Watch:
        def __getattr__(self, name):
            return lambda *_args, **_kwargs: None

    commits = []
    async with make_rollouts(
        ScriptedEngine(),
        source=prompts(),
        n_samples_per_prompt=4,
        scorer=_RaisesInEveryOtherGroup(),
        failure_budget=1.0,
        over_sampling_batch_size=8,
        commit=commits.append,
        observers=[Watch()],
    ) as rollouts:
        batch = await rollouts.generate_batch()
    for group in batch.groups:
        seen |= {rollout.rollout_id: rollout.samples[0].reward for rollout in group.rollouts}
    assert seen
    assert all(reward == float(rollout_id) for rollout_id, reward in seen.items())
    failed = [dropped for dropped in commits[0].dropped if dropped.reason == "failed"]
    for dropped in failed:
        rewards = [rollout.samples[0].reward for rollout in dropped.group.rollouts]
        ids = [rollout.rollout_id for rollout in dropped.group.rollouts]
        assert rewards[3] is None
        assert rewards[:3] == [float(each) for each in ids[:3]]
    assert failed


class _RaisesInEveryOtherGroup(RaisesForThird):
    async def score(self, rollouts, prompt):
        verdicts = await super().score(rollouts, prompt)
        if rollouts[0].rollout_id // 4 % 2:
            return verdicts
        return [Verdict(reward=float(rollout.rollout_id)) for rollout in rollouts]


@pytest.mark.parametrize(("rewards", "is_kept"), [([0.1] * 8, False), ([0.7] * 8, False), ([0.0] * 7 + [1.0], True)])
def test_r28_equal_rewards_are_dropped_whatever_their_rounding(rewards: list[float], is_kept: bool) -> None:
    decide = build_filter("reward_std", {}, n_samples_per_prompt=8, reward_key=None)
    decision = decide(make_group(rewards).samples)
    assert isinstance(decision, Keep if is_kept else Drop)


def test_r28_a_group_of_one_is_decided_without_a_nan() -> None:
    decide = build_filter("reward_std", {}, n_samples_per_prompt=1, reward_key=None)
    assert isinstance(decide(make_group([1.0]).samples), Drop)


async def test_r29_the_buffer_comes_first_in_order_and_the_source_fills_the_rest(make_rollouts, tick_engine) -> None:
    waiting = tuple(Group(number, make_prompt()) for number in range(3))
    state = RunState(
        next_step=1, next_group_index=3, source={}, requeued=waiting, ledger=LedgerCounts(drawn=3, requeued=3)
    )
    engine = ScriptedEngine()
    async with make_rollouts(engine, source=_AnyState(), state=state, rollout_batch_size=5) as rollouts:
        batch = await rollouts.generate_batch()
    assert [group.group_index for group in batch.groups] == [0, 1, 2, 3, 4]
    order = list(dict.fromkeys(int(r.request_id.rpartition("rollout")[2]) // 2 for r in engine.requests))
    assert order == [0, 1, 2, 3, 4]


class _AnyState(ListSource):
    def __init__(self) -> None:
        super().__init__([f"prompt {number}" for number in range(100)])

    def load_state_dict(self, state) -> None:
        del state


def test_r29_a_group_of_wrong_size_is_refused() -> None:
    buffer = Buffer(fifo, n_samples_per_prompt=2, max_bytes=1 << 20)
    rollout = Rollout(rollout_id=0, samples=(make_sample(),))
    with pytest.raises(RunFailedError, match="1 rollouts"):
        buffer.add([Group(0, make_prompt(), (rollout,))])
    assert len(buffer) == 0


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_r46_rounds_of_many_samples_leave_nothing_behind(make_rollouts) -> None:
    engine = ScriptedEngine()
    source = ListSource([f"prompt {number}" for number in range(100)], repeat=True)
    async with make_rollouts(
        engine, source=source, rollout_batch_size=50, n_samples_per_prompt=10, mode="async", max_staleness=1
    ) as rollouts:
        for round_number in range(6):
            await rollouts.generate_batch()
            engine.requests.clear()
            if round_number == 2:
                before = (len(os.listdir("/proc/self/fd")), threading.active_count())
                tasks, memory = len(asyncio.all_tasks()), _resident_bytes()
        assert len(os.listdir("/proc/self/fd")) <= before[0]
        assert threading.active_count() <= before[1]
        assert len(asyncio.all_tasks()) <= tasks + 50 * 11
        assert _resident_bytes() < 1.2 * memory


def test_r46_a_tokenizer_may_be_used_from_many_threads_at_once() -> None:
    tokenizer, errors = CharTokenizer(), []

    def encode() -> None:
        try:
            for number in range(100):
                assert len(tokenizer.encode(f"text {number}", add_special_tokens=False)) == len(f"text {number}")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=encode) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []

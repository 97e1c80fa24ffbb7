"""Partial and asynchronous rollouts: nothing is wasted, nothing is too old, and every prompt is somewhere."""

import random
from collections import Counter

import numpy as np
import pytest

from rollfeed.errors import EngineUnavailableError, RunFailedError
from rollfeed.testing import ListSource
from rollfeed.types import Drop, FilterDecision, Keep, SampleStatus, StepCommit


def prompts(count: int = 10_000) -> ListSource:
    return ListSource([f"prompt {number}" for number in range(count)])


def lognormal(rollout_id: int, *, median: float = 20.0, sigma: float = 0.8, cap: int = 160) -> int:
    value = random.Random(rollout_id).gauss(0.0, sigma)
    return max(1, min(cap, round(median * float(np.exp(value)))))


SETTINGS = {"over_sampling_batch_size": 8, "refill_granularity": 1, "max_response_len": 1000, "n_samples_per_prompt": 2}


async def test_partial_rollouts_go_on_from_what_was_aborted(make_rollouts, tick_engine) -> None:
    engine, commits = tick_engine(lognormal), []
    async with make_rollouts(
        engine, source=prompts(), mode="partial", refill_counts="in_flight", commit=commits.append, **SETTINGS
    ) as rollouts:
        for _ in range(20):
            batch = await rollouts.generate_batch()
            for sample in batch.samples:
                assert sample.response_length == lognormal(sample.rollout_id)
                assert sample.status is SampleStatus.COMPLETED
    assert sum(commit.wasted_tokens.get("requeued", 0) for commit in commits) == 0
    resumed = [sample for commit in commits for sample in commit.batch.samples if "start_rollout_id" in sample.metadata]
    assert resumed
    trained = Counter(group.group_index for commit in commits for group in commit.batch.groups)
    assert set(trained.values()) == {1}
    kept = sum(draw.response_tokens for draw in commits[-1].state.requeued)
    kept += sum(group.response_tokens for group in commits[-1].state.surplus)
    assert sum(s.response_length for c in commits for s in c.batch.samples) + kept == engine.num_tokens


async def test_finished_members_of_an_aborted_group_are_neither_generated_nor_scored_again(
    make_rollouts, tick_engine
) -> None:
    # Group 0: one member of one token and one of a hundred; the others are short.
    engine = tick_engine(lambda rollout_id: 100 if rollout_id == 1 else 1 + rollout_id % 3)
    async with make_rollouts(
        engine, source=prompts(), mode="partial", refill_counts="in_flight", **SETTINGS
    ) as rollouts:
        seen: list[int] = []
        while 0 not in seen:
            seen += [group.group_index for group in (await rollouts.generate_batch()).groups]
    assert [rollout_id for rollout_id, _ in engine.asked].count(0) == 1
    assert [rollout_id for rollout_id, _ in engine.asked].count(1) > 2


async def test_start_rollout_id_is_the_step_of_the_first_abort(make_rollouts, tick_engine) -> None:
    engine, commits = tick_engine(lambda rollout_id: 60 if rollout_id < 2 else 4), []
    async with make_rollouts(
        engine, source=prompts(), mode="partial", refill_counts="in_flight", commit=commits.append, **SETTINGS
    ) as rollouts:
        while not any(group.group_index == 0 for commit in commits for group in commit.batch.groups):
            await rollouts.generate_batch()
    group = next(group for commit in commits for group in commit.batch.groups if group.group_index == 0)
    assert [sample.metadata["start_rollout_id"] for sample in group.samples] == [0, 0]
    assert len(commits) > 3


async def test_r06_new_tokens_of_a_resumed_response_are_trained_and_older_ones_masked(
    make_rollouts, tick_engine
) -> None:
    engine, found = tick_engine(lambda rollout_id: 60 if rollout_id == 0 else 4), None
    async with make_rollouts(
        engine,
        source=prompts(),
        mode="partial",
        refill_counts="in_flight",
        mask_offpolicy_in_partial_rollout=True,
        **SETTINGS,
    ) as rollouts:
        while found is None:
            batch = await rollouts.generate_batch()
            await rollouts.update_weights({}, policy_version=batch.step + 1)
            found = next((sample for sample in batch.samples if sample.rollout_id == 0), None)
    assert len(found.version_spans) > 2
    last = found.version_spans[-1]
    assert found.loss_mask.tolist() == [0.0] * last.start + [1.0] * (last.end - last.start)
    assert len(found.loss_mask) == found.response_length == 60


async def test_r09_tokens_keep_the_logprobs_and_versions_they_were_sampled_with(make_rollouts, tick_engine) -> None:
    engine, found = tick_engine(lambda rollout_id: 60 if rollout_id == 0 else 4), None
    async with make_rollouts(
        engine, source=prompts(), mode="partial", refill_counts="in_flight", **SETTINGS
    ) as rollouts:
        while found is None:
            batch = await rollouts.generate_batch()
            await rollouts.update_weights({}, policy_version=batch.step + 1)
            found = next((sample for sample in batch.samples if sample.rollout_id == 0), None)
    for span in found.version_spans:
        assert set(found.logprobs[span.start : span.end].tolist()) == {-1.0 - span.policy_version}
    assert [span.policy_version for span in found.version_spans] == list(range(len(found.version_spans)))


async def test_deterministic_partial_rollouts_train_prompts_in_order(make_rollouts, tick_engine) -> None:
    engine, order = tick_engine(lognormal), []
    async with make_rollouts(engine, source=prompts(), mode="partial", deterministic=True, **SETTINGS) as rollouts:
        for _ in range(10):
            order += [group.group_index for group in (await rollouts.generate_batch()).groups]
    assert order == list(range(40))


async def test_asynchronous_generation_goes_on_between_the_batches(make_rollouts, tick_engine) -> None:
    engine = tick_engine(lognormal)
    async with make_rollouts(engine, source=prompts(), mode="async", **SETTINGS) as rollouts:
        await rollouts.generate_batch()
        before = engine.num_tokens
        await engine.tick(engine.num_ticks + 40)  # nobody asks for a batch
        assert engine.num_tokens > before + 200
        assert rollouts.ledger.balanced


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("trainer_ticks", [0, 15, 60])
async def test_staleness_never_exceeds_the_limit(make_rollouts, tick_engine, max_staleness, trainer_ticks) -> None:
    engine, commits = tick_engine(lognormal), []
    async with make_rollouts(
        engine, source=prompts(), mode="async", max_staleness=max_staleness, commit=commits.append, **SETTINGS
    ) as rollouts:
        for step in range(60):
            batch = await rollouts.generate_batch()
            assert batch.metrics["rollout/staleness_max"] <= max_staleness
            await engine.tick(engine.num_ticks + trainer_ticks)
            await rollouts.update_weights({}, policy_version=step + 1)
    assert sum(commit.wasted_tokens.get("stale", 0) for commit in commits) == 0
    trained = Counter(group.group_index for commit in commits for group in commit.batch.groups)
    assert set(trained.values()) == {1}


@pytest.mark.soak
@pytest.mark.parametrize("trainer_ticks", [0, 60])
async def test_staleness_never_exceeds_the_limit_in_200_steps_nor_in_200_after_a_resume(
    make_rollouts, tick_engine, trainer_ticks
) -> None:
    commits: list[StepCommit] = []
    for part in range(2):
        engine = tick_engine(lognormal)
        engine.policy_version = 200 * part
        state = commits[-1].state if commits else None
        async with make_rollouts(
            engine, source=prompts(), mode="async", max_staleness=2, state=state, commit=commits.append, **SETTINGS
        ) as rollouts:
            for step in range(200 * part, 200 * part + 200):
                batch = await rollouts.generate_batch()
                assert batch.metrics["rollout/staleness_max"] <= 2
                await engine.tick(engine.num_ticks + trainer_ticks)
                await rollouts.update_weights({}, policy_version=step + 1)
    trained = Counter(group.group_index for commit in commits for group in commit.batch.groups)
    assert set(trained.values()) == {1}
    assert len(commits) == 400


async def test_r25_long_answers_are_trained_as_often_as_short_ones(make_rollouts, tick_engine) -> None:
    engine, trained = tick_engine(lognormal), []
    async with make_rollouts(engine, source=prompts(), mode="async", max_staleness=8, **SETTINGS) as rollouts:
        for step in range(100):
            trained += [s for s in (await rollouts.generate_batch()).samples]
            await rollouts.update_weights({}, policy_version=step + 1)
        drawn = rollouts.ledger.drawn
    lengths = [lognormal(rollout_id) for rollout_id in range(2 * drawn)]
    assert abs(np.mean([s.response_length for s in trained]) / np.mean(lengths) - 1.0) < 0.05


async def test_versions_that_come_faster_than_batches_leave_stale_groups_that_are_answered_again(
    make_rollouts, tick_engine
) -> None:
    engine, commits = tick_engine(lognormal), []
    async with make_rollouts(
        engine, source=prompts(), mode="async", max_staleness=1, commit=commits.append, **SETTINGS
    ) as rollouts:
        for step in range(30):
            batch = await rollouts.generate_batch()
            assert batch.metrics["rollout/staleness_max"] <= 1
            await rollouts.update_weights({}, policy_version=3 * step + 3)
    assert sum(commit.batch.metrics["rollout/groups_stale"] for commit in commits) > 0
    trained = Counter(group.group_index for commit in commits for group in commit.batch.groups)
    assert set(trained.values()) == {1}


@pytest.mark.parametrize("policy", ["drop", "mask"])
async def test_stale_groups_are_dropped_or_masked_by_policy(make_rollouts, tick_engine, policy) -> None:
    engine, commits = tick_engine(lognormal), []
    async with make_rollouts(
        engine,
        source=prompts(),
        mode="async",
        max_staleness=1,
        staleness_policy=policy,
        commit=commits.append,
        **SETTINGS,
    ) as rollouts:
        for step in range(30):
            batch = await rollouts.generate_batch()
            for sample in batch.samples:
                oldest = sample.oldest_trained_version
                assert oldest is None or batch.policy_version - oldest <= 1
            await rollouts.update_weights({}, policy_version=3 * step + 3)
    dropped = [dropped.reason for commit in commits for dropped in commit.dropped]
    masked = sum(int((s.loss_mask == 0).sum()) for commit in commits for s in commit.batch.samples)
    assert ("stale" in dropped) == (policy == "drop")
    assert (masked > 0) == (policy == "mask")


@pytest.mark.parametrize("mode", ["partial", "async"])
async def test_a_state_taken_at_any_step_loses_and_doubles_nothing(make_rollouts, tick_engine, mode) -> None:
    commits: list[StepCommit] = []
    for start in range(8):
        state = commits[-1].state if commits else None
        source = prompts()
        async with make_rollouts(
            tick_engine(lognormal), source=source, mode=mode, state=state, commit=commits.append, **SETTINGS
        ) as rollouts:
            for _ in range(3):
                await rollouts.generate_batch()
                assert rollouts.ledger.balanced
        assert len(commits) == 3 * (start + 1)
    state = commits[-1].state
    trained = Counter(group.group_index for commit in commits for group in commit.batch.groups)
    waiting = [draw.group_index for draw in (*state.requeued, *state.in_flight)]
    waiting += [group.group_index for group in state.surplus]
    assert set(trained.values()) == {1}
    assert sorted([*trained, *waiting]) == list(range(state.ledger.drawn))


async def test_half_of_the_groups_dropped_still_fills_every_batch(make_rollouts, tick_engine) -> None:
    def every_other(samples) -> FilterDecision:
        return Drop("odd") if samples[0].group_index % 2 else Keep()

    engine = tick_engine(lognormal)
    async with make_rollouts(engine, source=prompts(), mode="async", group_filter=every_other, **SETTINGS) as rollouts:
        for _ in range(20):
            batch = await rollouts.generate_batch()
            assert all(group.group_index % 2 == 0 for group in batch.groups)
        assert rollouts.ledger.dropped > 20
        assert engine.num_idle_slots < 0.05 * engine.num_ticks * 8


@pytest.mark.parametrize("mode", ["sync", "partial", "async"])
@pytest.mark.parametrize("cause", ["filtered", "ended", "engine"])
async def test_a_step_that_cannot_finish_says_why_and_can_be_tried_again(
    make_rollouts, tick_engine, mode, cause
) -> None:
    blocked = True

    def decide(samples) -> FilterDecision:
        return Drop("useless") if blocked and cause == "filtered" else Keep()

    async def answer(request, *, services):
        if blocked and cause == "engine":
            raise EngineUnavailableError("nobody answers")
        return await services.default(request, services=services)

    said = {"filtered": "dropped as useless", "ended": "the prompt source has ended", "engine": "nobody answers"}
    commits: list[StepCommit] = []
    async with make_rollouts(
        tick_engine(lambda rollout_id: 3),
        source=prompts(3 if cause == "ended" else 10_000),
        mode=mode,
        group_filter=decide,
        generate_fn=answer,
        max_draws_per_batch=4,
        failure_minimum=6,
        commit=commits.append,
        **SETTINGS,
    ) as rollouts:
        with pytest.raises(RunFailedError, match=said[cause]):
            await rollouts.generate_batch()
        assert rollouts.ledger.balanced
        assert rollouts.ledger.in_flight == 0
        assert commits == []
        blocked = False
        if cause == "filtered":
            batch = await rollouts.generate_batch()
            assert len(batch.groups) == 4

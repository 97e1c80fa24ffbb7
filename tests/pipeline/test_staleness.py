"""No sample in a batch is staler than allowed, in no mode and whatever made the batch."""

import asyncio
import random
from collections import Counter

import pytest

from rollfeed.errors import RunFailedError
from rollfeed.testing import Fault, ListSource, ScriptedEngine
from rollfeed.types import Ending, LedgerCounts, StepCommit, Surplus, Trained, VersionSpan

MODES = ["sync", "partial", "async"]
POLICIES = ["requeue", "mask", "drop"]


def prompts(count: int = 10_000) -> ListSource:
    return ListSource([f"prompt {number}" for number in range(count)])


def staleness(batch) -> int:
    oldest = [sample.oldest_trained_version for sample in batch.samples]
    return max(batch.policy_version - version for version in oldest if version is not None)


def indices(groups) -> list[int]:
    return [group.group_index for group in groups]


def total(commits: list[StepCommit], name: str) -> float:
    return sum(commit.batch.metrics.get(name, 0.0) for commit in commits)


async def twice_as_many(context) -> list[Ending]:
    """Finish two batches and keep one of them for the next step."""
    groups = list(context.surplus)
    drawn = await context.draw(2 * context.rollout_batch_size - len(groups))
    groups += await asyncio.gather(*map(context.submit, drawn))
    count = context.rollout_batch_size
    return [*map(Trained, groups[:count]), *map(Surplus, groups[count:])]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
async def test_a_rollout_function_of_ones_own_delivers_nothing_staler_than_allowed(make_rollouts, mode, policy) -> None:
    commits: list[StepCommit] = []
    async with make_rollouts(
        ScriptedEngine(),
        source=prompts(),
        rollout_fn=twice_as_many,
        mode=mode,
        max_staleness=0,
        staleness_policy=policy,
        commit=commits.append,
    ) as rollouts:
        for step in range(4):
            batch = await rollouts.generate_batch()
            assert staleness(batch) == batch.metrics["rollout/staleness_max"] == 0
            await rollouts.update_weights({}, policy_version=3 * step + 3)
    trained = Counter(group.group_index for commit in commits for group in commit.batch.groups)
    assert len(trained) == sum(trained.values()) == 16
    assert total(commits, "rollout/groups_stale") > 0
    dropped = {each.reason for commit in commits for each in commit.dropped}
    assert dropped == ({"stale"} if policy == "drop" else set())
    lost = sum(commit.wasted_tokens.get("stale", 0) for commit in commits)
    assert total(commits, "rollout/wasted_tokens/stale") == lost > 0


async def test_surplus_that_is_too_old_is_answered_again_before_new_prompts(make_rollouts) -> None:
    async with make_rollouts(ScriptedEngine(), source=prompts(), rollout_fn=twice_as_many) as rollouts:
        assert indices((await rollouts.generate_batch()).groups) == [0, 1, 2, 3]
        assert rollouts.ledger.surplus == 4
        await rollouts.update_weights({}, policy_version=1)
        batch = await rollouts.generate_batch()
        assert indices(batch.groups) == [4, 5, 6, 7]
        assert staleness(batch) == 0


async def test_surplus_is_trained_on_while_the_weights_stay_the_same(make_rollouts) -> None:
    engine = ScriptedEngine()
    async with make_rollouts(engine, source=prompts(), rollout_fn=twice_as_many) as rollouts:
        await rollouts.generate_batch()
        batch = await rollouts.generate_batch()
        assert indices(batch.groups) == [4, 5, 6, 7]
        assert len(engine.requests) == 12 * 2


async def test_surplus_that_a_rollout_function_does_not_name_stays_surplus(make_rollouts) -> None:
    async def forgetful(context) -> list[Ending]:
        groups = await asyncio.gather(*map(context.submit, await context.draw(5)))
        return [*map(Trained, groups[:4]), *map(Surplus, groups[4:])]

    commits: list[StepCommit] = []
    async with make_rollouts(
        ScriptedEngine(), source=prompts(), rollout_fn=forgetful, commit=commits.append
    ) as rollouts:
        for _ in range(3):
            await rollouts.generate_batch()
    assert indices(commits[-1].state.surplus) == [4, 9, 14]
    assert commits[-1].state.ledger == LedgerCounts(drawn=15, trained=12, surplus=3)


class Overtaken:
    """A rollout function whose groups are overtaken by new weights in its first calls, but for some of each call."""

    def __init__(self, engine: ScriptedEngine, *num_fresh: int) -> None:
        self.asked: list[int] = []
        self._engine = engine
        self._num_fresh = list(num_fresh)

    async def __call__(self, context) -> list[Ending]:
        count = context.rollout_batch_size
        self.asked.append(count)
        num_old = count - self._num_fresh.pop(0) if self._num_fresh else 0
        groups = [await context.submit(group) for group in await context.draw(num_old)]
        self._engine.policy_version += min(1, num_old)
        groups += [await context.submit(group) for group in await context.draw(count - num_old)]
        return list(map(Trained, groups))


@pytest.mark.parametrize(
    ("num_fresh", "asked"), [((3,), [4, 1]), ((0,), [4, 4]), ((0, 2), [4, 4, 2]), ((0, 2, 0), [4, 4, 2, 4])]
)
@pytest.mark.parametrize("mode", MODES)
async def test_a_rollout_function_is_asked_again_for_what_was_too_old(make_rollouts, mode, num_fresh, asked) -> None:
    engine, commits = ScriptedEngine(), []
    rollout_fn = Overtaken(engine, *num_fresh)
    async with make_rollouts(
        engine, source=prompts(), mode=mode, max_staleness=0, rollout_fn=rollout_fn, commit=commits.append
    ) as rollouts:
        batch = await rollouts.generate_batch()
        await rollouts.generate_batch()
    assert rollout_fn.asked[: len(asked)] == asked
    assert indices(batch.groups) == [0, 1, 2, 3]
    assert staleness(batch) == 0
    num_stale = commits[0].batch.metrics["rollout/groups_stale"]
    assert commits[0].wasted_tokens == {"stale": num_stale * 2 * 2}
    assert commits[0].state.ledger.drawn - commits[0].state.ledger.in_flight == 4
    assert indices(commits[1].batch.groups) == [4, 5, 6, 7]


async def test_two_calls_in_a_row_that_give_nothing_new_enough_end_the_run(make_rollouts) -> None:
    engine = ScriptedEngine()
    rollout_fn = Overtaken(engine, 0, 0)
    async with make_rollouts(engine, source=prompts(), rollout_fn=rollout_fn, max_staleness=0) as rollouts:
        with pytest.raises(
            RunFailedError,
            match=r"nothing new enough twice in a row: group 0 has version 1, .* and 1 more are too old, "
            r"the engine has version 2 and rollout\.max_staleness is 0",
        ):
            await rollouts.generate_batch()
        assert rollouts.ledger == LedgerCounts(drawn=4, requeued=4)
        assert indices((await rollouts.generate_batch()).groups) == [0, 1, 2, 3]


async def test_a_step_that_fails_after_it_was_asked_again_gives_everything_back_once(make_rollouts) -> None:
    engine, calls = ScriptedEngine(), []

    async def fails_later(context) -> list[Ending]:
        calls.append(indices(context.surplus))
        if len(calls) == 3:
            raise ValueError("broken")
        first, *others = await twice_as_many(context)
        engine.policy_version += len(calls) == 2
        (late,) = [await context.submit(group) for group in await context.draw(1)]
        return [*others, Trained(late), Surplus(first.group)]

    async with make_rollouts(engine, source=prompts(), rollout_fn=fails_later) as rollouts:
        await rollouts.generate_batch()
        before = rollouts.ledger
        with pytest.raises(RunFailedError, match="ValueError: broken"):
            await rollouts.generate_batch()
        after = rollouts.ledger
        assert after.balanced
        assert (after.trained, after.dropped, after.in_flight) == (before.trained, 0, 0)
        trained = [index for _ in range(4) for index in indices((await rollouts.generate_batch()).groups)]
    assert len(set(trained)) == 16
    assert not set(trained) & {1, 2, 3, 8}


@pytest.mark.parametrize("policy", POLICIES)
async def test_weights_that_come_during_a_step_leave_a_synchronous_batch_on_policy(
    make_rollouts, tick_engine, policy
) -> None:
    engine, commits = tick_engine(lambda rollout_id: 3 + rollout_id % 9), []
    async with make_rollouts(
        engine,
        source=prompts(),
        staleness_policy=policy,
        over_sampling_batch_size=6,
        max_response_len=100,
        commit=commits.append,
    ) as rollouts:
        for version in range(1, 7):
            making = asyncio.create_task(rollouts.generate_batch())
            await engine.tick(engine.num_ticks + 6)
            await rollouts.update_weights({}, policy_version=version)
            batch = await making
            assert (batch.policy_version, staleness(batch)) == (version, 0)
            assert batch.metrics["rollout/groups_untrained"] == 0
    masked = sum(int((sample.loss_mask == 0).sum()) for commit in commits for sample in commit.batch.samples)
    assert (masked > 0) == (policy == "mask")
    assert total(commits, "rollout/wasted_tokens/stale") >= max(masked, 1)


@pytest.mark.parametrize("mode", ["sync", "partial"])
async def test_weights_that_come_between_the_last_answer_and_the_cut_are_noticed(make_rollouts, mode) -> None:
    class UpdatedAtTheEnd(ScriptedEngine):
        async def abort(self, request_id: str | None = None) -> None:
            self.policy_version = 1
            await super().abort(request_id)

    engine = UpdatedAtTheEnd(
        fault_of=lambda request: Fault.HANG if request.request_id.startswith("step0-rollout8") else None
    )
    async with make_rollouts(
        engine, source=prompts(), mode=mode, max_staleness=0, over_sampling_batch_size=5
    ) as rollouts:
        batch = await rollouts.generate_batch()
        assert rollouts.ledger.balanced
    assert (batch.policy_version, staleness(batch)) == (1, 0)
    assert indices(batch.groups) == [0, 1, 2, 3]
    assert batch.metrics["rollout/groups_stale"] == 4


@pytest.mark.parametrize("mode", MODES)
async def test_the_last_prompts_of_a_source_are_trained_on_even_if_they_became_too_old(make_rollouts, mode) -> None:
    async with make_rollouts(
        ScriptedEngine(), source=prompts(8), mode=mode, max_staleness=0, over_sampling_batch_size=8
    ) as rollouts:
        first = indices((await rollouts.generate_batch()).groups)
        await rollouts.update_weights({}, policy_version=1)
        batch = await rollouts.generate_batch()
    assert sorted([*first, *indices(batch.groups)]) == list(range(8))
    assert staleness(batch) == 0


LONG = {"refill_counts": "in_flight", "over_sampling_batch_size": 8, "refill_granularity": 1, "max_response_len": 1000}


async def test_partial_rollouts_have_no_limit_by_default_and_show_their_age(make_rollouts, tick_engine) -> None:
    engine, commits = tick_engine(lambda rollout_id: 60 if rollout_id == 0 else 4), []
    async with make_rollouts(engine, source=prompts(), mode="partial", commit=commits.append, **LONG) as rollouts:
        while 0 not in [group.group_index for commit in commits for group in commit.batch.groups]:
            batch = await rollouts.generate_batch()
            await rollouts.update_weights({}, policy_version=batch.step + 1)
    assert batch.metrics["rollout/staleness_max"] == staleness(batch) == batch.policy_version > 2
    assert 0 < batch.metrics["rollout/staleness_mean"] < batch.metrics["rollout/staleness_max"]
    assert total(commits, "rollout/groups_stale") == 0


@pytest.mark.parametrize("policy", POLICIES)
async def test_partial_rollouts_keep_a_limit_that_is_set(make_rollouts, tick_engine, policy) -> None:
    engine, commits = tick_engine(lambda rollout_id: 60 if rollout_id % 16 == 0 else 4), []
    async with make_rollouts(
        engine,
        source=prompts(),
        mode="partial",
        max_staleness=1,
        staleness_policy=policy,
        commit=commits.append,
        **LONG,
    ) as rollouts:
        for step in range(20):
            batch = await rollouts.generate_batch()
            assert staleness(batch) <= 1
            await rollouts.update_weights({}, policy_version=step + 1)
    assert total(commits, "rollout/wasted_tokens/stale") > 0


@pytest.mark.parametrize("mask", [False, True])
async def test_masking_of_older_versions_covers_surplus(make_rollouts, mask) -> None:
    commits: list[StepCommit] = []
    async with make_rollouts(
        ScriptedEngine(),
        source=prompts(),
        rollout_fn=twice_as_many,
        mode="partial",
        mask_offpolicy_in_partial_rollout=mask,
        commit=commits.append,
    ) as rollouts:
        await rollouts.generate_batch()
        await rollouts.update_weights({}, policy_version=1)
        batch = await rollouts.generate_batch()
    # Nothing would be left of groups that are older as a whole: they are answered again and counted.
    assert indices(batch.groups) == [4, 5, 6, 7]
    assert batch.metrics["rollout/groups_untrained"] == 0
    assert staleness(batch) == (0 if mask else 1)
    assert batch.metrics["rollout/groups_stale"] == (4 if mask else 0)
    assert commits[1].wasted_tokens == ({"stale": 4 * 2 * 2} if mask else {})


async def test_masking_leaves_the_new_tokens_of_surplus(make_rollouts, tick_engine) -> None:
    engine = tick_engine(lambda rollout_id: 12 if rollout_id < 16 else 4, slots=16)
    async with make_rollouts(
        engine,
        source=prompts(),
        rollout_fn=twice_as_many,
        mode="partial",
        mask_offpolicy_in_partial_rollout=True,
        max_response_len=100,
    ) as rollouts:
        making = asyncio.create_task(rollouts.generate_batch())
        await engine.tick(6)
        await rollouts.update_weights({}, policy_version=1)
        batches = [await making, await rollouts.generate_batch()]
    assert indices(batches[1].groups) == [4, 5, 6, 7]
    new = [sample.version_spans[-1] for sample in batches[1].samples]
    assert any(span.start > 0 and span.policy_version == 1 for span in new)
    for sample, span in zip(batches[1].samples, new, strict=True):
        assert sample.loss_mask.tolist() == [0.0] * span.start + [1.0] * (span.end - span.start)
    assert batches[1].metrics["rollout/wasted_tokens/stale"] == sum(span.start for span in new)


@pytest.mark.parametrize("asked", [False, True])
async def test_members_that_had_finished_are_masked_only_where_asked(make_rollouts, tick_engine, asked) -> None:
    # Group 0: one member of four tokens and one of sixty.
    engine, found = tick_engine(lambda rollout_id: 60 if rollout_id == 1 else 4), None
    async with make_rollouts(
        engine,
        source=prompts(),
        mode="partial",
        mask_offpolicy_in_partial_rollout=True,
        mask_offpolicy_finished_members=asked,
        **LONG,
    ) as rollouts:
        while found is None:
            batch = await rollouts.generate_batch()
            await rollouts.update_weights({}, policy_version=batch.step + 1)
            found = next((group for group in batch.groups if group.group_index == 0), None)
    finished, resumed = found.samples
    assert finished.version_spans == (VersionSpan(0, 4, 0),)
    assert finished.loss_mask.tolist() == [0.0 if asked else 1.0] * 4
    assert resumed.loss_mask.any()
    assert not resumed.loss_mask.all()
    assert finished.reward is not None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", MODES)
async def test_whatever_happens_no_sample_is_staler_than_allowed_and_no_prompt_is_lost(
    make_rollouts, tick_engine, mode, seed
) -> None:
    """Invariants 1 and 4, at random: limits, policies, lengths, functions, weights at any time, resumptions."""
    rng = random.Random(f"{mode} {seed}")
    limit, policy = rng.choice([0, 1, 2]), POLICIES[seed % 3]
    settings = {
        "mode": mode,
        "max_staleness": limit,
        "staleness_policy": policy,
        "over_sampling_batch_size": rng.choice([4, 6, 8]),
        "refill_granularity": 1,
        "max_response_len": 1000,
        **({"rollout_fn": twice_as_many} if seed % 2 else {}),
        **({"mask_offpolicy_in_partial_rollout": True} if rng.random() < 0.5 else {}),
    }
    commits: list[StepCommit] = []
    version = 0
    for _ in range(4):
        engine = tick_engine(lambda rollout_id: random.Random(rollout_id).choice([1, 3, 5, 9, 30]))
        engine.policy_version = version
        state = commits[-1].state if commits else None
        async with make_rollouts(engine, source=prompts(), state=state, commit=commits.append, **settings) as rollouts:
            for _ in range(5):
                making = asyncio.create_task(rollouts.generate_batch())
                for _ in range(rng.randrange(2 if "rollout_fn" in settings else 3)):
                    await engine.tick(engine.num_ticks + rng.randrange(1, 20))
                    version += rng.randrange(3)
                    await rollouts.update_weights({}, policy_version=version)
                try:
                    batch = await making
                except RunFailedError as error:
                    # A function that is overtaken twice has failed; the scheduler begins again by itself.
                    if "rollout_fn" not in settings or "twice in a row" not in str(error):
                        raise
                    continue
                assert batch.policy_version <= version
                assert staleness(batch) <= limit
                assert batch.metrics["rollout/groups_untrained"] == 0
                assert rollouts.ledger.balanced
    state = commits[-1].state
    ended = [group.group_index for commit in commits for group in commit.batch.groups]
    ended += [dropped.group.group_index for commit in commits for dropped in commit.dropped]
    waiting = [draw.group_index for draw in (*state.requeued, *state.in_flight)] + indices(state.surplus)
    assert sorted([*ended, *waiting]) == list(range(state.ledger.drawn))


async def test_deterministic_steps_with_new_weights_between_them_do_not_depend_on_completion_order(
    make_rollouts,
) -> None:
    outcomes = []
    for order in range(4):
        commits: list[StepCommit] = []
        async with make_rollouts(
            ScriptedEngine(random_order=order, max_running_requests=16),
            source=prompts(),
            deterministic=True,
            over_sampling_factor=2.0,
            commit=commits.append,
        ) as rollouts:
            for step in range(5):
                await rollouts.generate_batch()
                await rollouts.update_weights({}, policy_version=step + 1)
        outcomes.append([[(s.index, s.response) for s in commit.batch.samples] for commit in commits])
        assert total(commits, "rollout/staleness_max") == 0
    assert all(outcome == outcomes[0] for outcome in outcomes)

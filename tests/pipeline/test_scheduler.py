import asyncio
from collections.abc import Sequence

import pytest

from rollfeed.errors import RunFailedError
from rollfeed.testing import Fault, ListSource, ScriptedEngine, ScriptedRequest
from rollfeed.types import Drop, FilterDecision, Keep, LedgerCounts, Sample, StepCommit


def text_of(request: ScriptedRequest) -> str:
    return "".join(map(chr, request.token_ids))


def drop_prompts(*texts: str):
    """Return a filter that drops the groups of some prompts."""

    def decide(samples: Sequence[Sample]) -> FilterDecision:
        text = "".join(map(chr, samples[0].token_ids[: samples[0].prompt_length]))
        return Drop("unwanted") if text in texts else Keep()

    return decide


def group_indices(commit_or_batch) -> list[int]:
    return [group.group_index for group in commit_or_batch.groups]


async def test_a_step_yields_exactly_the_batch_ordered_by_index(make_rollouts) -> None:
    async with make_rollouts(ScriptedEngine(random_order=3), over_sampling_batch_size=7) as rollouts:
        for _ in range(5):
            batch = await rollouts.generate_batch()
            indices = group_indices(batch)
            assert len(indices) == 4
            assert indices == sorted(indices)
            assert all(len(group.rollouts) == 2 for group in batch.groups)
            assert rollouts.ledger.balanced


async def test_without_over_sampling_only_the_batch_is_submitted(make_rollouts) -> None:
    engine = ScriptedEngine()
    async with make_rollouts(engine) as rollouts:
        await rollouts.generate_batch()
    assert len(engine.requests) == 4 * 2


async def test_over_sampling_submits_more_and_aborts_the_rest(make_rollouts) -> None:
    engine = ScriptedEngine()
    commits: list[StepCommit] = []
    async with make_rollouts(engine, over_sampling_factor=1.5, commit=commits.append) as rollouts:
        await rollouts.generate_batch()
    assert len(engine.requests) == 6 * 2
    state = commits[0].state
    assert len(state.requeued) + len(state.surplus) == 2


async def test_r30_one_rejected_group_submits_exactly_the_granularity(make_rollouts) -> None:
    engine = ScriptedEngine()
    filtered = drop_prompts("prompt 1")
    async with make_rollouts(
        engine, over_sampling_batch_size=6, refill_granularity=1, group_filter=filtered
    ) as rollouts:
        await rollouts.generate_batch()
    assert len({text_of(request) for request in engine.requests}) == 6 + 1


async def test_without_a_granularity_a_whole_wave_is_submitted_when_the_batch_cannot_fill(make_rollouts) -> None:
    engine = ScriptedEngine()
    async with make_rollouts(engine, group_filter=drop_prompts("prompt 1")) as rollouts:
        await rollouts.generate_batch()
    assert len({text_of(request) for request in engine.requests}) == 4 + 4


def finishing_together(count: int):
    """Return a generate function whose calls return only when ``count`` of them have been made."""
    barrier = asyncio.Barrier(count)

    async def generate(request, *, services):
        samples = await services.default(request, services=services)
        await barrier.wait()
        return samples

    return generate


async def test_finished_surplus_is_kept_for_the_next_step(make_rollouts) -> None:
    commits: list[StepCommit] = []
    engine = ScriptedEngine()
    async with make_rollouts(
        engine,
        over_sampling_batch_size=8,
        n_samples_per_prompt=1,
        generate_fn=finishing_together(8),
        commit=commits.append,
    ) as rollouts:
        first = await rollouts.generate_batch()
        surplus = [group.group_index for group in commits[0].state.surplus]
        second = await rollouts.generate_batch()
    assert group_indices(first) == [0, 1, 2, 3]
    assert surplus == group_indices(second) == [4, 5, 6, 7]
    assert len(engine.requests) == 8


async def test_every_prompt_is_trained_once_over_many_steps_with_over_sampling(make_rollouts) -> None:
    commits: list[StepCommit] = []
    source = ListSource([f"prompt {number}" for number in range(1000)])
    async with make_rollouts(
        ScriptedEngine(random_order=5), source=source, over_sampling_factor=2.0, commit=commits.append
    ) as rollouts:
        trained = [group.prompt.prompt_id for _ in range(30) for group in (await rollouts.generate_batch()).groups]
        counts = rollouts.ledger
    assert len(trained) == len(set(trained)) == 120
    assert counts.drawn == 120 + counts.requeued + counts.surplus
    waiting = [draw.prompt.prompt_id for draw in commits[-1].state.requeued]
    waiting += [group.prompt.prompt_id for group in commits[-1].state.surplus]
    assert sorted(trained + waiting) == sorted(f"list/{n}@e0" for n in range(counts.drawn))


async def test_dropped_surplus_is_counted_as_discarded(make_rollouts) -> None:
    commits: list[StepCommit] = []
    async with make_rollouts(
        ScriptedEngine(),
        over_sampling_batch_size=8,
        n_samples_per_prompt=1,
        surplus="drop",
        generate_fn=finishing_together(8),
        commit=commits.append,
    ) as rollouts:
        await rollouts.generate_batch()
    assert commits[0].state.surplus == ()
    assert commits[0].state.ledger == LedgerCounts(drawn=8, trained=4, discarded=4)
    assert commits[0].wasted_tokens == {"discarded": 4 * 2}


async def test_aborted_prompts_are_discarded_when_they_are_not_to_be_requeued(make_rollouts) -> None:
    commits: list[StepCommit] = []
    engine = ScriptedEngine(fault_of=lambda request: Fault.HANG if text_of(request) == "prompt 0" else None)
    async with make_rollouts(
        engine, over_sampling_batch_size=5, requeue_aborted=False, commit=commits.append
    ) as rollouts:
        batch = await rollouts.generate_batch()
    assert group_indices(batch) == [1, 2, 3, 4]
    assert len(commits[0].state.requeued) == 0
    assert commits[0].state.ledger == LedgerCounts(drawn=5, trained=4, discarded=1)


async def test_requeued_prompts_come_before_new_ones_and_keep_their_index(make_rollouts) -> None:
    hanging = {"prompt 0"}
    engine = ScriptedEngine(fault_of=lambda request: Fault.HANG if text_of(request) in hanging else None)
    async with make_rollouts(engine, over_sampling_batch_size=5) as rollouts:
        await rollouts.generate_batch()
        hanging.clear()
        second = await rollouts.generate_batch()
    assert group_indices(second)[0] == 0


async def test_a_group_member_that_hangs_does_not_stop_the_step_when_others_fill_it(make_rollouts) -> None:
    engine = ScriptedEngine(fault_of=lambda request: Fault.DEAF if request.request_id == "step0-rollout0" else None)
    async with make_rollouts(engine, over_sampling_batch_size=6, abort_grace_seconds=0.5) as rollouts:
        batch = await rollouts.generate_batch()
        assert 0 not in group_indices(batch)
        assert rollouts.ledger.balanced


async def test_a_step_that_the_filter_never_lets_through_ends_with_the_reasons(make_rollouts) -> None:
    def drop_all(samples: Sequence[Sample]) -> FilterDecision:
        return Drop("zero_std_0.0")

    async with make_rollouts(ScriptedEngine(), group_filter=drop_all, max_draws_per_batch=3) as rollouts:
        with pytest.raises(RunFailedError, match=r"0 of 4 groups after 12 prompts .*12 dropped as zero_std_0\.0"):
            await rollouts.generate_batch()


async def test_a_step_whose_source_ends_says_so_and_gives_its_prompts_back(make_rollouts) -> None:
    source = ListSource(["a", "b", "c", "d", "e", "f"])
    async with make_rollouts(ScriptedEngine(), source=source) as rollouts:
        await rollouts.generate_batch()
        with pytest.raises(RunFailedError, match="2 of 4 groups after 2 prompts and the prompt source has ended"):
            await rollouts.generate_batch()
        assert rollouts.ledger == LedgerCounts(drawn=6, trained=4, requeued=2)


async def test_groups_dropped_as_usable_fill_a_batch_that_would_be_short(make_rollouts) -> None:
    def drop_but_usable(samples: Sequence[Sample]) -> FilterDecision:
        return Drop("zero_std_1.0", usable=samples[0].group_index != 1)

    source = ListSource(["a", "b", "c", "d", "e"])
    commits: list[StepCommit] = []
    async with make_rollouts(
        ScriptedEngine(), source=source, group_filter=drop_but_usable, commit=commits.append
    ) as rollouts:
        batch = await rollouts.generate_batch()
    assert group_indices(batch) == [0, 2, 3, 4]
    assert [dropped.group.group_index for dropped in commits[0].dropped] == [1]


async def test_deterministic_batches_do_not_depend_on_completion_order(make_rollouts) -> None:
    outcomes = []
    for order in range(6):
        engine = ScriptedEngine(random_order=order, max_running_requests=16)
        async with make_rollouts(
            engine,
            deterministic=True,
            over_sampling_factor=2.0,
            group_filter=drop_prompts("prompt 1", "prompt 5"),
            max_requests_in_flight=[1, 4, 16][order % 3],
        ) as rollouts:
            batches = [await rollouts.generate_batch() for _ in range(4)]
        outcomes.append(
            [(group.group_index, [s.response for s in group.samples]) for b in batches for group in b.groups]
        )
    assert all(outcome == outcomes[0] for outcome in outcomes)


async def test_first_finished_batches_do_depend_on_completion_order(make_rollouts) -> None:
    outcomes = set()
    for order in range(6):
        engine = ScriptedEngine(random_order=order)
        async with make_rollouts(engine, over_sampling_factor=2.0) as rollouts:
            outcomes.add(tuple(group_indices(await rollouts.generate_batch())))
    assert len(outcomes) > 1

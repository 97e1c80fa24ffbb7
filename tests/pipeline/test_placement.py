"""Long answers start first, or in rounds of their own, and no prompt is lost on the way."""

from collections import Counter

import numpy as np
import pytest

from rollfeed.pipeline import LengthHistory, Placement
from rollfeed.testing import ListSource

SETTINGS = {"max_response_len": 1000, "n_samples_per_prompt": 2}
NUM_PROMPTS = 20


def length_of(rollout_id: int) -> int:
    """Every fifth prompt has long answers."""
    prompt = rollout_id // 2 % NUM_PROMPTS
    return 60 if prompt % 5 == 4 else 4 + prompt % 3


def source() -> ListSource:
    return ListSource([f"prompt {number}" for number in range(NUM_PROMPTS)], repeat=True)


async def test_prompts_whose_answers_were_long_start_first(make_rollouts, tick_engine) -> None:
    engine = tick_engine(length_of, slots=64)
    placement = Placement(LengthHistory(), long_first=True)
    async with make_rollouts(
        engine, source=source(), placement=placement, rollout_batch_size=10, **SETTINGS
    ) as rollouts:
        for _ in range(2):
            await rollouts.generate_batch()
        engine.asked.clear()
        await rollouts.generate_batch()
    first = [rollout_id // 2 % NUM_PROMPTS for rollout_id, _ in engine.asked[:4]]
    assert set(first) == {4, 9}


@pytest.mark.parametrize("deterministic", [False, True])
async def test_long_prompts_are_collected_into_rounds_of_their_own(make_rollouts, tick_engine, deterministic) -> None:
    engine, longest, trained = tick_engine(length_of, slots=64), [], Counter()
    placement = Placement(LengthHistory(), round_size=4)
    async with make_rollouts(
        engine, source=source(), placement=placement, deterministic=deterministic, **SETTINGS
    ) as rollouts:
        for _ in range(40):
            batch = await rollouts.generate_batch()
            longest.append(sorted({length_of(sample.rollout_id) for sample in batch.samples}))
            trained.update(group.group_index for group in batch.groups)
        drawn, counts = rollouts.ledger.drawn, rollouts.ledger
    later = longest[8:]
    assert [60] in later
    assert all(lengths == [60] or 60 not in lengths for lengths in later)
    assert set(trained.values()) == {1}
    assert drawn == sum(trained.values()) + counts.requeued
    ticks_by_step = [max(lengths) for lengths in longest]
    assert np.mean(ticks_by_step[8:]) < 0.6 * 60


async def test_prompts_that_are_held_back_survive_a_restart(make_rollouts, tick_engine) -> None:
    commits, trained = [], Counter()
    for _ in range(12):
        state = commits[-1].state if commits else None
        async with make_rollouts(
            tick_engine(length_of, slots=64),
            source=source(),
            state=state,
            placement=Placement(LengthHistory(), round_size=4),
            commit=commits.append,
            **SETTINGS,
        ) as rollouts:
            for _ in range(2):
                trained.update(group.group_index for group in (await rollouts.generate_batch()).groups)
    waiting = [draw.group_index for draw in commits[-1].state.requeued]
    assert set(trained.values()) == {1}
    assert sorted([*trained, *waiting]) == list(range(commits[-1].state.ledger.drawn))


async def test_what_is_held_back_is_used_when_the_source_ends(make_rollouts, tick_engine) -> None:
    history = LengthHistory()
    texts = [f"prompt {number}" for number in range(NUM_PROMPTS)]
    async with make_rollouts(
        tick_engine(length_of, slots=64),
        source=ListSource(texts * 2),
        placement=Placement(history, round_size=100),
        **SETTINGS,
    ) as rollouts:
        trained = [group.group_index for _ in range(10) for group in (await rollouts.generate_batch()).groups]
    assert sorted(trained) == list(range(40))

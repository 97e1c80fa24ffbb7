"""A source that ends: what it gave is used as far as it fills batches, and the rest is left over."""

import asyncio
from collections.abc import Sequence

import pytest

from rollfeed.errors import PromptsEndedError, RunFailedError, SourceFailedError
from rollfeed.prompts import MixtureSource
from rollfeed.testing import ListSource, ScriptedEngine
from rollfeed.types import Drop, Ending, FilterDecision, Keep, Prompt, Sample, Trained


def texts(count: int) -> list[str]:
    return [f"prompt {number}" for number in range(count)]


async def batches_until_the_end(rollouts) -> tuple[list[list[int]], str]:
    """Return the group indices of all batches, and what was raised then."""
    made = []
    while True:
        try:
            batch = await rollouts.generate_batch()
        except PromptsEndedError as ended:
            return made, str(ended)
        made.append([group.group_index for group in batch.groups])


@pytest.mark.parametrize("mode", ["sync", "partial", "async"])
@pytest.mark.parametrize("over_sampling", [4, 7])
async def test_every_full_batch_is_made_and_the_rest_is_left_over(make_rollouts, mode: str, over_sampling: int) -> None:
    settings = {"mode": mode, "over_sampling_batch_size": over_sampling}
    async with make_rollouts(ScriptedEngine(random_order=3), source=ListSource(texts(14)), **settings) as rollouts:
        made, message = await batches_until_the_end(rollouts)
        counts = rollouts.ledger
    assert [len(batch) for batch in made] == [4, 4, 4]
    assert len({index for batch in made for index in batch}) == 12
    assert "step 3 has 2 of 4 groups" in message
    assert "the prompt source has ended" in message
    assert counts.balanced
    assert (counts.drawn, counts.trained, counts.requeued + counts.surplus) == (14, 12, 2)


async def test_a_deterministic_run_uses_what_was_requeued_at_the_end(make_rollouts) -> None:
    settings = {"deterministic": True, "over_sampling_batch_size": 9}
    async with make_rollouts(ScriptedEngine(random_order=3), source=ListSource(texts(10)), **settings) as rollouts:
        made, _ = await batches_until_the_end(rollouts)
    assert made == [[0, 1, 2, 3], [4, 5, 6, 7]]


async def test_prompts_that_a_filter_dropped_count_as_left_over_with_their_step(make_rollouts) -> None:
    def decide(samples: Sequence[Sample]) -> FilterDecision:
        return Drop("seventh") if samples[0].group_index == 7 else Keep()

    async with make_rollouts(ScriptedEngine(), source=ListSource(texts(8)), group_filter=decide) as rollouts:
        made, message = await batches_until_the_end(rollouts)
        counts = rollouts.ledger
    assert made == [[0, 1, 2, 3]]
    assert "step 1 has 3 of 4 groups" in message
    assert "1 dropped as seventh" in message
    assert counts.balanced
    assert (counts.trained, counts.dropped, counts.failed, counts.requeued) == (4, 0, 0, 4)


async def test_draws_that_run_out_by_their_limit_are_no_end_of_data(make_rollouts) -> None:
    def drop(samples: Sequence[Sample]) -> FilterDecision:
        return Drop("all")

    async with make_rollouts(ScriptedEngine(), group_filter=drop, max_draws_per_batch=2) as rollouts:
        with pytest.raises(RunFailedError, match="max_draws_per_batch is reached") as failed:
            await rollouts.generate_batch()
    assert not isinstance(failed.value, PromptsEndedError)


async def short_batch(context) -> list[Ending]:
    """A rollout function that returns what it has."""
    drawn = await context.draw(context.rollout_batch_size)
    return [Trained(group) for group in await asyncio.gather(*map(context.submit, drawn))]


async def draws_again(context) -> list[Ending]:
    """A rollout function that draws until its batch is full."""
    groups = []
    while len(groups) < context.rollout_batch_size:
        drawn = await context.draw(context.rollout_batch_size - len(groups))
        groups += [await context.submit(group) for group in drawn]
    return [Trained(group) for group in groups]


@pytest.mark.parametrize("rollout_fn", [short_batch, draws_again])
async def test_rollout_functions_of_users_meet_the_end_too(make_rollouts, rollout_fn) -> None:
    async with make_rollouts(ScriptedEngine(), source=ListSource(texts(6)), rollout_fn=rollout_fn) as rollouts:
        made, message = await batches_until_the_end(rollouts)
        counts = rollouts.ledger
    assert made == [[0, 1, 2, 3]]
    assert "the prompt source has ended" in message
    assert counts.balanced
    assert (counts.trained, counts.requeued) == (4, 2)


async def test_a_short_batch_of_a_source_that_goes_on_is_an_error(make_rollouts) -> None:
    async def short(context) -> list[Ending]:
        (group,) = await context.draw(1)
        return [Trained(await context.submit(group))]

    async with make_rollouts(ScriptedEngine(), rollout_fn=short) as rollouts:
        with pytest.raises(RunFailedError) as failed:
            await rollouts.generate_batch()
    assert not isinstance(failed.value, PromptsEndedError)


class Gated(ListSource):
    """A source that waits before its fourth and fifth draw, as for a worker."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__(texts)
        self.num_draws = 0
        self.waits, self.opened = asyncio.Event(), asyncio.Event()

    async def draw(self, count: int) -> list[Prompt]:
        self.num_draws += 1
        if self.num_draws in (4, 5):
            self.waits.set()
            await self.opened.wait()
        return await super().draw(count)


@pytest.mark.parametrize("mode", ["sync", "partial", "async"])
async def test_a_step_that_is_cancelled_while_it_draws_loses_no_prompt(make_rollouts, mode: str) -> None:
    gated = Gated(texts(12))
    source = MixtureSource([("gated", 1.0, gated)], seed=0)
    async with make_rollouts(ScriptedEngine(), source=source, mode=mode) as rollouts:
        for _ in range(2):  # the second time what was drawn before comes from the buffer
            making = asyncio.create_task(rollouts.generate_batch())
            await gated.waits.wait()
            gated.waits.clear()
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)
        gated.opened.set()
        made, _ = await batches_until_the_end(rollouts)
        counts = rollouts.ledger
    assert sorted(index for batch in made for index in batch) == list(range(12))
    assert counts.balanced


class Failing(ListSource):
    """A source that can make no more when its texts are used up."""

    async def draw(self, count: int) -> list[Prompt]:
        if not (prompts := await super().draw(count)):
            raise SourceFailedError("the generator is broken")
        return prompts


@pytest.mark.parametrize("mode", ["sync", "partial", "async"])
async def test_a_source_that_fails_ends_the_run_with_its_cause_when_its_prompts_are_used(
    make_rollouts, mode: str
) -> None:
    made = []
    async with make_rollouts(ScriptedEngine(random_order=3), source=Failing(texts(14)), mode=mode) as rollouts:
        for _ in range(3):
            made += (await rollouts.generate_batch()).groups
        with pytest.raises(RunFailedError, match="the generator is broken: step 3 has 2 of 4 groups") as failed:
            await rollouts.generate_batch()
    assert len({group.group_index for group in made}) == 12
    assert not isinstance(failed.value, PromptsEndedError)

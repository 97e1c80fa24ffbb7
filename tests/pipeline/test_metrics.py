"""Every number of a step, for a step in which every way a prompt can go is gone once."""

import asyncio

import pytest

from rollfeed.testing import Fault, ListSource, ScriptedEngine
from rollfeed.types import OVER_SAMPLED, STALE, Discarded, Dropped, Ending, Failed, StepCommit, Surplus, Trained

TOKENS = 2  # of every response: a digit and the end of the turn


async def every_way(context) -> list[Ending]:
    """Give thirteen groups every fate: four are trained on, and the last one is left to the manager."""
    drawn = await context.draw(13)
    groups = await asyncio.gather(*map(context.submit, drawn[:12]))
    context.requeue(groups[9])
    return [
        *map(Trained, groups[:4]),
        Dropped(groups[4], "equal"),
        Dropped(groups[5], "short"),
        Dropped(groups[10], OVER_SAMPLED),
        Dropped(groups[11], STALE),
        Failed(groups[6], groups[6].error),
        Surplus(groups[7]),
        Discarded(groups[8], "surplus"),
    ]


async def test_every_number_of_a_step(make_rollouts) -> None:
    commits: list[StepCommit] = []
    engine = ScriptedEngine(
        answer=lambda request: "1",
        fault_of=lambda request: Fault.RAISE if request.request_id == "step0-rollout13" else None,
    )
    source = ListSource([f"prompt {number}" for number in range(20)])
    async with make_rollouts(engine, source=source, rollout_fn=every_way, commit=commits.append) as rollouts:
        metrics = dict((await rollouts.generate_batch()).metrics)
    assert metrics.pop("perf/step_seconds") > 0
    assert metrics.pop("perf/tokens_per_second") > 0
    assert {name: value for name, value in metrics.items() if name.startswith("ledger/")} == {
        "ledger/drawn": 13,
        "ledger/trained": 4,
        "ledger/dropped": 4,
        "ledger/failed": 1,
        "ledger/surplus": 1,
        "ledger/discarded": 1,
        "ledger/requeued": 2,
        "ledger/in_flight": 0,
    }
    assert {name: value for name, value in metrics.items() if name.startswith("rollout/groups_")} == {
        "rollout/groups_submitted": 12,
        "rollout/groups_dropped": 4,
        "rollout/groups_over_sampled": 1,
        "rollout/groups_failed": 1,
        "rollout/groups_surplus": 1,
        "rollout/groups_stale": 2,
        "rollout/groups_discarded": 1,
        "rollout/groups_requeued": 2,
        "rollout/groups_untrained": 0,
    }
    assert {name: value for name, value in metrics.items() if name.startswith("rollout/dynamic_filter/")} == {
        "rollout/dynamic_filter/drop_equal": 1,
        "rollout/dynamic_filter/drop_short": 1,
    }
    assert {name: value for name, value in metrics.items() if name.startswith("rollout/wasted_tokens/")} == {
        "rollout/wasted_tokens/dropped": 4 * TOKENS,
        "rollout/wasted_tokens/failed": TOKENS,
        "rollout/wasted_tokens/discarded": 2 * TOKENS,
        "rollout/wasted_tokens/over_sampled": 2 * TOKENS,
        "rollout/wasted_tokens/stale": 4 * TOKENS,
    }
    assert metrics["rollout/generated_tokens"] == 23 * TOKENS
    assert metrics["rollout/trained_tokens"] == 8 * TOKENS
    assert metrics["rollout/reward_error"] == metrics["rollout/reward_timeout"] == 0
    assert commits[0].wasted_tokens == {"dropped": 8, "failed": 2, "discarded": 4, "over_sampled": 4, "stale": 8}
    assert [draw.group_index for draw in commits[0].state.requeued] == [9, 12]


@pytest.mark.parametrize(("mode", "wasted"), [("sync", 3 * TOKENS), ("partial", None)])
async def test_what_a_step_leaves_unfinished_is_requeued_and_counted(make_rollouts, mode, wasted) -> None:
    async def four_of_six(context) -> list[Ending]:
        tasks = [context.submit(group) for group in await context.draw(6)]
        done = await asyncio.gather(*tasks[:4])
        for _ in range(20):
            await asyncio.sleep(0)
        await context.abort()
        return [Trained(group) for group in done]

    engine = ScriptedEngine(
        answer=lambda request: "1",
        fault_of=lambda request: Fault.HANG if request.request_id == "step0-rollout11" else None,
    )
    source = ListSource([f"prompt {number}" for number in range(20)])
    async with make_rollouts(engine, source=source, rollout_fn=four_of_six, mode=mode) as rollouts:
        metrics = (await rollouts.generate_batch()).metrics
    assert metrics["rollout/groups_requeued"] == 2
    assert metrics["ledger/requeued"] == 2
    if wasted is None:
        assert "rollout/wasted_tokens/requeued" not in metrics
    else:
        assert metrics["rollout/wasted_tokens/requeued"] == wasted


async def test_numbers_of_the_engine_are_among_those_of_the_step(make_rollouts) -> None:
    class Counting(ScriptedEngine):
        def metrics(self) -> dict[str, float]:
            return {"requests": float(len(self.requests))}

    async with make_rollouts(Counting()) as rollouts:
        assert (await rollouts.generate_batch()).metrics["engine/requests"] == 8


async def test_a_response_that_was_gone_on_with_and_has_several_versions_is_counted(make_rollouts, tick_engine) -> None:
    engine = tick_engine(lambda rollout_id: 12 if rollout_id < 2 else 4)
    settings = {"over_sampling_batch_size": 8, "refill_counts": "in_flight", "max_response_len": 1000}
    source = ListSource([f"prompt {number}" for number in range(100)])
    async with make_rollouts(engine, source=source, mode="partial", **settings) as rollouts:
        first = (await rollouts.generate_batch()).metrics
        await rollouts.update_weights({}, policy_version=1)
        batch = await rollouts.generate_batch()
    assert first["rollout/resumed_ratio"] == first["rollout/several_versions_ratio"] == 0
    spans = [len(sample.version_spans) for sample in batch.samples]
    resumed = ["start_rollout_id" in sample.metadata for sample in batch.samples]
    assert batch.metrics["rollout/resumed_ratio"] == sum(resumed) / 8 > 0
    assert batch.metrics["rollout/several_versions_ratio"] == sum(count > 1 for count in spans) / 8 > 0
    oldest = [1 - sample.version_spans[0].policy_version for sample in batch.samples]
    assert batch.metrics["rollout/staleness_max"] == max(oldest) == 1
    assert batch.metrics["rollout/staleness_mean"] == sum(oldest) / 8
